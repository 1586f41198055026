"""testing/jobs/driver_job.py with one habit of ours taken away, for ulfm_bugs.py to compare."""

from __future__ import annotations

import os
import sys

from recover_megatron.collectives.guard import GuardedCommunicator

if os.environ.get("BENCH_NO_SETTLE"):
    GuardedCommunicator._settle = lambda self: None  # type: ignore[method-assign]

if __name__ == "__main__":
    from recover_megatron.session import leaving
    from recover_megatron.testing.jobs import driver_job

    driver_job.STEPS = int(os.environ.get("BENCH_STEPS", driver_job.STEPS))
    driver_job.SIZE = int(os.environ.get("BENCH_SIZE", driver_job.SIZE))
    try:
        driver_job.main()
    except BaseException as error:  # noqa: BLE001
        leaving.die(None, error)
    sys.exit(0)
