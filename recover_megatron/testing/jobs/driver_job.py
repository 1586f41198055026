"""The production session without Megatron: the driver over real MPI on integer "gradients".

    mpirun ... python driver_job.py <recovery flags>

Each rank ends with one line `replica position epoch survivors committed`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import numpy as np

from recover_megatron.adapters.megatron.command_line import read_job
from recover_megatron.recovery.bucket import Bucket
from recover_megatron.session import leaving
from recover_megatron.session.session import Session
from recover_megatron.session.start import start

STEPS, MICROBATCHES, BUCKETS, SIZE = 8, 12, 4, 1 << 18


class SumWork:
    """Bucket k's gradient of microbatch i in step s is s * (i + 1) * (k + 1), exact in float32."""

    def __init__(self, session: Session, step: int):
        self._session, self._step, self._forwards = session, step, 0
        self._buckets = [
            Bucket(np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)) for _ in range(BUCKETS)
        ]

    def compute(self, microbatches: Sequence[int]) -> None:
        raise_if_asked(self._session, self._step)
        self._session.injector.expect("forward", len(microbatches))
        for i in microbatches:
            self._session.watchdog.beat()
            self._session.injector.enter("forward", self._forwards)
            self._forwards += 1
            for k, bucket in enumerate(self._buckets):
                bucket.local[:] += self._step * (i + 1) * (k + 1)
        self._session.watchdog.rest()

    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def commit(self) -> None:
        total = self._step * sum(range(1, MICROBATCHES + 1))
        for k, bucket in enumerate(self._buckets):
            assert (bucket.reduced == total * (k + 1)).all(), bucket.reduced


def raise_if_asked(session: Session, step: int) -> None:
    if os.environ.get("RAISE_AT") == f"{session.replica_id}.{session.position}@{step}":
        raise ZeroDivisionError("as any bug would")


def main() -> None:
    # torch is not needed, and slow to import.
    session = start(read_job(sys.argv[1:]), torch_world=lambda membership, own: None)
    raise_if_asked(session, 0)
    for step in range(1, STEPS + 1):
        session.injector.begin(step)
        session.injector.expect("sync", BUCKETS)
        session.driver.run_step(step, MICROBATCHES, SumWork(session, step))
        session.watchdog.between()
        session.injector.enter("optimizer")
    leaving.finish(session, 0)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:  # noqa: BLE001
        leaving.die(None, error)
