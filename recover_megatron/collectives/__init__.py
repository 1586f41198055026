"""Replicas talk to each other here, and nowhere else.

guard.py      the protocol's calls: reduce, agree, repair
membership/   who is alive: MPI with ULFM (fault-tolerant MPI), a watchdog for each rank
fabric/       moves buckets among the ranks that hold the same position
openmpi.py    the only importer of mpi4py
"""
