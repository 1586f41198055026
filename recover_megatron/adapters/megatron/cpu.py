"""The CPU platform: runs Megatron on gloo, on a machine without a GPU (docs/cpu.md).

Megatron asks torch.cuda for a device in some hundred places. Here torch.cuda is made to look as if
one device were there, and that device is the CPU. `torch.cuda.is_available()` stays False, so torch
itself is not misled. Nothing is installed unless the user asks with `--recover-platform cpu`.

Each stand-in says which Megatron code needs it; all were needed by core_v0.16.1 to 0.19.0
(docs/megatron-seams.md, section 3).
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import time
import types
import typing
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor zeros ones empty full rand randn randint arange linspace eye as_tensor randperm "
    "zeros_like ones_like empty_like full_like rand_like randn_like empty_strided logspace "
    "tril_indices triu_indices"
).split()


def install_torch() -> None:
    """Before Megatron is imported. Once per process."""
    if not hasattr(typing, "override"):  # Megatron >= 0.18 on Python 3.11
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    _stand_in_for_triton()
    # jit_fuser = torch.compile: would start inductor and a C++ compiler at start-up.
    torch.compile = _identity_decorator  # type: ignore[assignment]
    _stand_in_for_dynamo()
    _stand_in_for_device_queries()
    _stand_in_for_streams()
    _stand_in_for_generators()
    _redirect_tensors()
    _redirect_distributed()
    _share_gloo_device()


def install_core() -> None:
    """After `megatron.core` can be imported, before a model is built."""
    import megatron.core.datasets.utils as dataset_utils
    import megatron.core.pipeline_parallel.schedules as schedules
    import megatron.core.tensor_parallel.random as mcore_random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.default_generator.set_state(new_state)

    mcore_random._set_cuda_rng_state = set_state
    # fork() warns, for each microbatch, that the "CPU" generator moved.
    logging.getLogger(mcore_random.__name__).setLevel(logging.ERROR)
    schedules.deallocate_output_tensor = _keeping_sent(schedules.deallocate_output_tensor)
    if not hasattr(moe_utils, "te_general_gemm"):  # looked at unguarded without transformer-engine
        moe_utils.te_general_gemm = None
    # `make` asks python3-config, which may be another Python's.
    dataset_utils.compile_helpers = lambda: None
    _borrow_dataset_helpers()


def _keeping_sent(deallocate: Callable[..., None]) -> Callable[..., None]:
    """gloo sends from a tensor's memory after isend has returned, and there is no stream to order
    the release after it: the memory is kept for some more microbatches."""
    sent: deque[torch.Tensor] = deque(maxlen=32)

    def wrapper(out: Any, *args: Any, **more: Any) -> None:
        if isinstance(out, torch.Tensor):
            sent.append(out.data)
        deallocate(out, *args, **more)

    return wrapper


def install_training() -> None:
    """After `megatron.training` can be imported, before pretrain() runs."""
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    if hasattr(initialize, "fused_kernels"):  # gone in 0.17; needs nvcc
        initialize.fused_kernels.load = lambda args: None
    training.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )


def _identity_decorator(function: Any = None, *options: Any, **more: Any) -> Any:
    return function if function is not None else (lambda f: f)


class _Dynamo(types.ModuleType):
    """What torch's optimizers ask of torch._dynamo where nothing is compiled. Importing the real
    one takes an eighth of a job's start; whoever asks for more gets it."""

    disable = staticmethod(_identity_decorator)
    graph_break = staticmethod(lambda: None)
    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _stand_in_for_dynamo() -> None:
    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = _Dynamo("torch._dynamo")


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _stand_in_for_device_queries() -> None:
    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=8 << 30, multi_processor_count=1
    )
    for name, value in {
        "device_count": 1,  # parallel_state and the RNG tracker are skipped at 0
        "current_device": _CPU,
        "set_device": None,
        "get_device_capability": (9, 0),
        "get_device_name": "cpu",
        "get_device_properties": properties,
        "synchronize": None,
        "empty_cache": None,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "device_memory_used": 0,
        "reset_peak_memory_stats": None,
        "mem_get_info": (0, 0),
    }.items():
        setattr(cuda, name, _constant(value))

    class Zeros(dict[str, int]):
        def __missing__(self, key: str) -> int:
            return 0

    cuda.memory_stats = _constant(Zeros())
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _constant(None))


class _Stream:
    """All work is done when it is issued, so every wait has already ended."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any): ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: Any) -> None: ...


class _Event:
    def __init__(self, *args: Any, **kwargs: Any):
        self._time = 0.0

    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record(self, *args: Any) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other._time - self._time) * 1e3


def _stand_in_for_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = _constant(_Stream())
    cuda.set_stream = _constant(None)
    cuda.stream = cuda.device = lambda *args, **kwargs: contextlib.nullcontext()


def _stand_in_for_generators() -> None:
    """The CUDA generator is the CPU's. `manual_seed_all` is called by torch.manual_seed itself."""
    cuda: Any = torch.cuda
    generator = torch.default_generator

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    cuda.manual_seed = manual_seed
    cuda.initial_seed = generator.initial_seed
    cuda.manual_seed_all = cuda.random.manual_seed_all = _constant(None)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: generator.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda s, *a, **k: generator.set_state(s)


def _names_cuda(device: Any) -> bool:
    if device is None or isinstance(device, torch.dtype | torch.Tensor | bool):
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return wrapper


def _redirect_tensors() -> None:
    # One by one: a TorchFunctionMode would tax every operation.
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = _redirected_to(kind.to)  # type: ignore[method-assign]
        kind.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *args: self  # type: ignore[method-assign]
    stock_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # clip_grads.py asserts torch.cuda.FloatTensor; the optimizers switch on such names.
        found = stock_type(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.type = tensor_type  # type: ignore[assignment, method-assign]


def _redirected_to(stock_to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock_to)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if args and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        return stock_to(self, *args, **kwargs)

    return to


def _redirect_distributed() -> None:
    """nccl becomes gloo; arguments that only a GPU has are dropped."""
    distributed: Any = torch.distributed

    def dropping(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for name in names:
                kwargs.pop(name, None)
            if kwargs.get("backend") == "nccl":
                kwargs["backend"] = "gloo"
            return function(*args, **kwargs)

        return wrapper

    distributed.barrier = dropping(distributed.barrier, "device_ids")
    distributed.init_process_group = dropping(distributed.init_process_group, "device_id")
    distributed.new_group = dropping(distributed.new_group, "pg_options")
    exchange = distributed.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        # The token dispatcher of experts turns tensors into numbers only if they are on a GPU.
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return exchange(*args, **kwargs)

    distributed.all_to_all_single = all_to_all_single


def _share_gloo_device() -> None:
    """All of a rank's process groups use one gloo device. By default each has its own, whose thread
    wakes up a hundred times a second; Megatron makes some fifty groups a rank, and on a machine
    with more ranks than cores that was a fifth of all time."""
    gloo: Any = torch.distributed.ProcessGroupGloo
    stock_init = gloo.__init__
    devices: list[Any] = []

    @functools.wraps(stock_init)
    def init(self: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
        if given or set(named) != {"timeout"}:
            stock_init(self, store, rank, size, *given, **named)
            return
        if not devices:
            devices.append(gloo.create_default_device())
        options = gloo._Options()
        options._devices = devices
        options._timeout = named["timeout"]
        stock_init(self, store, rank, size, options)

    gloo.__init__ = init


def _stand_in_for_triton() -> None:
    """Megatron imports triton unguarded and only decorates with it. torch asks whether triton is
    there and caches the answer: let it find the truth before the stand-in appears."""
    from torch.utils import _triton

    if _triton.has_triton_package():
        return
    for probe in (
        "has_triton",
        "has_triton_tma",
        "has_triton_tma_device",
        "has_triton_experimental_host_tma",
    ):
        if hasattr(_triton, probe):
            getattr(_triton, probe)()

    class Anything:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            decorates = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType)
            return args[0] if decorates else Anything()

        def __getitem__(self, item: Any) -> Any:
            return self

        def __or__(self, other: Any) -> Any:
            return self

        __ror__ = __or__

    def module(name: str) -> Any:
        made: Any = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        made.__path__ = []
        made.__getattr__ = Anything().__getattr__
        sys.modules[name] = made
        return made

    triton = module("triton")
    triton.__version__ = "3.4.0"
    triton.language = module("triton.language")
    triton.jit = _identity_decorator
    triton.autotune = triton.heuristics = lambda *args, **kwargs: lambda f: f
    triton.cdiv = lambda a, b: -(-a // b)


def _borrow_dataset_helpers() -> None:
    """A checkout without its compiled dataset helper uses the installed megatron-core wheel's."""
    import megatron.core.datasets as datasets

    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is not None:
        return
    for folder in sys.path:
        pattern = os.path.join(folder, "megatron/core/datasets/helpers_cpp*.so")
        for path in glob.glob(pattern):
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                continue
            helper = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(helper)
            sys.modules[name] = helper
            datasets.helpers_cpp = helper
            return
