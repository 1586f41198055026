"""Moves buckets among the ranks of a position group. Who is dead, it need not know.

interface.py  what a fabric does: open, start, wait, abort
plan.py       who sends what to whom, as data that prints (pure)
mpi.py        the ring over MPI's sends and receives
"""
