"""Fires the faults of this rank: real ends and real hangs at named points of an iteration."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from recover_megatron.events import Event, FaultInjected
from recover_megatron.faults import Fault

_FULL_BYTES = 100_000


class Injector:
    """The driver's and the adapter's probe (recovery.driver.Probe). Costs next to nothing when this
    rank has no fault planned."""

    def __init__(self, faults: Sequence[Fault], emit: Callable[[Event], None]):
        self._faults = list(faults)
        self.emit = emit
        self._iteration = 0
        self._count: dict[str, int] = {}
        self._entered: dict[tuple[str, int], float] = {}
        self._took: dict[tuple[str, int], float] = {}
        self._armed: Fault | None = None

    def plans(self, phase: str) -> bool:
        return any(fault.phase == phase for fault in self._faults)

    def begin(self, iteration: int) -> None:
        """The iteration as the host logs it (from 1) begins."""
        self._iteration = iteration

    def expect(self, phase: str, count: int) -> None:
        """`phase` will be entered with indices 0..count-1; a fault's index past the last means it,
        so that every planned fault strikes."""
        self._count[phase] = count

    def enter(
        self, phase: str, index: int = 0, make_nan: Callable[[], None] = lambda: None
    ) -> None:
        """This rank is about to do `phase`: a fault planned for here happens now. `make_nan` is
        what a fault of that kind does."""
        if not self._faults:
            return
        self._entered[phase, index] = time.monotonic()
        last = self._count.get(phase, 1) - 1
        for fault in list(self._faults):
            here = fault.iteration == self._iteration and fault.phase == phase
            if here and min(fault.index, last) == index:
                if phase in ("sync", "save") and fault.kind == "kill":
                    self._arm(fault, phase, index)
                elif fault.kind == "nan":
                    self._tell(fault)
                    self._faults.remove(fault)
                    make_nan()
                else:
                    self._fire(fault)

    def leave(self, phase: str, index: int = 0) -> None:
        """The all-reduce of bucket `index`, or the save, has ended. A fault that was to strike
        inside strikes."""
        if not self._faults:
            return
        self._took[phase, index] = time.monotonic() - self._entered[phase, index]
        if self._armed is not None:
            self._fire(self._armed)

    def _arm(self, fault: Fault, phase: str, index: int) -> None:
        """Strike half-way through what comes, judged by how long it took before."""
        self._armed = fault
        delay = self._took.get((phase, index), 0.002) / 2
        timer = threading.Timer(delay, self._fire, (fault,))
        timer.daemon = True
        timer.start()

    def _fire(self, fault: Fault) -> None:
        self._tell(fault)
        if fault.kind == "full":
            self._faults.remove(fault)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, hard))
            return
        self._end(fault.kind)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.kind == "hold":
            ctypes.PyDLL(None).sleep(3600)  # a PyDLL call keeps Python's lock
        while True:  # alive, holding its place, making no progress
            time.sleep(3600)

    def _tell(self, fault: Fault) -> None:
        self.emit(FaultInjected(iteration=fault.iteration, phase=fault.phase, fault=str(fault)))

    def _end(self, kind: str) -> None:
        """The process ends in this way, if the kind is one of faults.ENDS."""
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if kind == "raise":
            raise ArithmeticError("an injected fault")
        if kind == "leave":
            sys.exit(0)
        if kind == "exit":
            os._exit(0)
        if kind == "abort":
            os.abort()
        if kind == "segv":
            ctypes.string_at(0)
