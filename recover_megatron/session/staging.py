"""Gradients between an accelerator and the host memory that MPI reads and writes.

Device to host, MPI and host to device go on at the same time, piece by piece: while one piece is
reduced, later ones come down on a side stream and earlier ones go up on another. Nothing is
allocated on the device.

The rules, which tests/test_staging.py checks on a stand-in that performs its copies late:

1. A piece's `local` may be read only after `ready`; `reduced` may be written only after `ready`.
2. The device's memory may be written by computation only after `before_compute`.
3. What `arrived` began counts only after the agreement; until then nobody reads that memory.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch


class Device(Protocol):
    """An accelerator's asynchronous copies. Handles are opaque."""

    def host_buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory from which the device can copy without the host's help."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Begin a copy of equal shape and dtype, after all computation issued so far. Neither side
        may be written, nor `target` read, until it has ended."""

    def wait(self, copy: Any) -> None:
        """The host waits until the copy has ended."""

    def before_compute(self, copy: Any) -> None:
        """Computation that is issued from now on waits for the copy; the host does not."""


class CudaDevice:
    """Two side streams, one for each direction. Written to CUDA's rules, not run on a GPU yet."""

    def __init__(self) -> None:
        self._down, self._up = torch.cuda.Stream(), torch.cuda.Stream()

    def host_buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        stream = self._down if source.is_cuda else self._up
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def wait(self, copy: torch.cuda.Event) -> None:
        copy.synchronize()

    def before_compute(self, copy: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(copy)


class HostDevice:
    """For gradients in host memory that MPI cannot sum as they are (bf16, fp16)."""

    def host_buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def wait(self, copy: None) -> None: ...

    def before_compute(self, copy: None) -> None: ...


class StagedPiece:
    """One piece of the gradient on the device, and its float32 copies in host memory: `local`, what
    this replica computed, and `reduced`, where the sum arrives.

    A gradient of another type passes through a buffer of its own type, so that the device needs no
    memory to convert it: it is widened and narrowed on the host.
    """

    def __init__(self, view: torch.Tensor, device: Device):
        self._view, self._device = view, device
        self._local = device.host_buffer(view.numel(), torch.float32)
        self._reduced = device.host_buffer(view.numel(), torch.float32)
        self.local: np.ndarray[Any, Any] = self._local.numpy()
        self.reduced: np.ndarray[Any, Any] = self._reduced.numpy()
        self._narrow: torch.Tensor | None = None
        if view.dtype != torch.float32:
            self._narrow = device.host_buffer(view.numel(), view.dtype)
        self._coming: tuple[Any] | None = None
        self._going: tuple[Any] | None = None

    def stage_in(self) -> None:
        """After a backward pass: the gradient begins to come down."""
        self._end_going()
        target = self._local if self._narrow is None else self._narrow
        self._coming = (self._device.copy(target, self._view),)

    def ready(self) -> None:
        """Before MPI, or anyone, reads `local` or writes `reduced`."""
        self._end_going()
        if self._coming is not None:
            self._device.wait(*self._coming)
            self._coming = None
            if self._narrow is not None:
                self._local.copy_(self._narrow)

    def arrived(self) -> None:
        """`reduced` holds a sum: it begins to go up, into the gradient's own place."""
        source = self._reduced
        if self._narrow is not None:
            self._narrow.copy_(self._reduced)
            source = self._narrow
        self._going = (self._device.copy(self._view, source),)

    def before_compute(self) -> None:
        """Before the device's memory is read or written by what follows."""
        if self._coming is not None:
            self._device.before_compute(*self._coming)
        if self._going is not None:
            self._device.before_compute(*self._going)

    def _end_going(self) -> None:
        if self._going is not None:
            self._device.wait(*self._going)
            self._going = None
