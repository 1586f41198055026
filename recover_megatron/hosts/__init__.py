"""Jobs on several hosts that outlive any of them, mpirun's own included.

Open MPI's run-time (PRRTE 3.0) ends the whole job when it loses a host. It is kept from noticing:
mpirun starts each host through `agent.py`, which starts `relay.py` there; the run-time's one
connection between the two goes through a tunnel at both ends (`tunnel.py`), and whichever side is
lost, the other's end stays open. What the run-time no longer tells, `witness.py` does: a process
per host that knows which hosts and ranks have surely died, and when the job is done.
"""
