"""One iteration, from its plan to its commit, whatever fails meanwhile.

`machine.py` decides (pure), `driver.py` acts, `bucket.py` has what is reduced, and keeps what a
reduction must not destroy, `present.py` holds the world that all have agreed on.
"""
