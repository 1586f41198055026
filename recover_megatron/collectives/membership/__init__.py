"""Who is alive.

ulfm.py      asks, agrees, shrinks, by fault-tolerant MPI; interface.py says what that means
engine.py    the one thread that calls MPI
watcher.py   replicas die whole: a rank leaves when a mate has died
watchdog.py  each rank's parent: however the rank ends, it makes the others notice
death.py     last words, then SIGKILL
settling.py  when the dead have died
quorum.py    which side of a partition may go on, and what proves a death
"""
