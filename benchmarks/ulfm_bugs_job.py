"""tests/jobs/driver_job.py with one habit of ours taken away, for ulfm_bugs.py to compare."""

from __future__ import annotations

import os
import sys

from recover_megatron.collectives.guard import GuardedCommunicator

if os.environ.get("BENCH_NO_SETTLE"):
    GuardedCommunicator._settle = lambda self: None  # type: ignore[method-assign]

if __name__ == "__main__":
    from recover_megatron.adapters.megatron import bootstrap, session
    from tests.jobs import driver_job

    session._own_torch_world = lambda *facts: None  # torch is not needed, and slow to import
    if os.environ.get("BENCH_BLOCKING"):
        start = driver_job.start

        def start_blocking(argv):
            session = start(argv)
            from recover_megatron.collectives import ulfm

            def reduce(self, comm, call, send, receive, op):
                try:
                    comm.Allreduce(send, receive, ulfm._OPS[op])
                except ulfm.MPI.Exception as error:
                    raise ulfm._lost(error, call) from None

            ulfm.UlfmTransport._reduce = reduce
            return session

        driver_job.start = start_blocking
    try:
        driver_job.main()
    except BaseException as error:  # noqa: BLE001
        bootstrap.die(None, error)
    sys.exit(0)
