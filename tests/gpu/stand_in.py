"""A CUDA device that is none: names, shapes, dtypes, order of calls as on one, values by the CPU.

While it is open, whoever asks for ``cuda`` is given memory of the host that says it is the
device's. A tensor is the host's if a function made it without a device from tensors of the host
alone, or copied it there; all others are the device's, those of a backward too. An event knows
whether it was recorded, so that a wait for what nobody recorded is an error, and a graph is a tape
of operators (:mod:`tests.cpu.tape`), which refuses reads by the host as a capture does.

Not stood in for: Triton's and libraries' kernels, clocks, sizes of memory, and what runs at the
same time. Tests of those alone are marked ``real_device``.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from moefold.kernels import fused
from moefold.kernels.grouped import grouped
from moefold.parallel.pipeline import lanes, recording
from moefold.training import machine
from tests.cpu.tape import recording as tape_of
from tests.reads import VALUES

HAS_DEVICE = torch.cuda.is_available()
"""Whether the machine has a real one."""
DEVICE = torch.device("cuda", 0)
NAME = "stand-in for a device"
MEMORY = 16 << 30
READS = {getattr(Tensor, name) for name in VALUES} | {Tensor.nonzero, torch.nonzero, torch.equal}
"""Functions that wait for the device where they are given a tensor of it."""
PLACE = vars(torch._C.TensorBase)["device"].__get__


class Event:
    """What a stream has reached."""

    def __init__(self, enable_timing: bool = False, **more: Any) -> None:
        self.is_recorded = False

    def record(self, stream: "Stream | None" = None) -> None:
        """Note that work before it is queued."""
        self.is_recorded = True

    def wait(self, stream: "Stream | None" = None) -> None:
        """Let a stream wait for it."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        assert self.is_recorded, "an event is waited for that nobody recorded"

    def query(self) -> bool:
        """Return whether it is reached."""
        return self.is_recorded

    def elapsed_time(self, end: "Event") -> float:
        """Return no time: nothing here takes any."""
        return 0.0


class Stream:
    """A queue of work, all of which is done."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = DEVICE

    def wait_event(self, event: Event) -> None:
        """Wait for what another stream has reached."""
        event.synchronize()

    def wait_stream(self, stream: "Stream") -> None:
        """Wait for all that another stream was given."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event of what it has reached."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether it is done."""
        return True

    def synchronize(self) -> None:
        """Let the host wait for it."""
        SYNCHRONISING.waits("synchronize")


class Generator(torch.Generator):
    """A generator of random numbers, which are the host's."""

    def __new__(cls, device: Any = None) -> "Generator":
        """Return one for any device."""
        return super().__new__(cls)


class _Synchronising:
    """What waiting for the device does: nothing, or an error."""

    mode = "default"

    def waits(self, what: str) -> None:
        said = f"called a synchronizing CUDA operation: {what}"
        if self.mode == "error":
            raise RuntimeError(said)
        if self.mode == "warn":
            warnings.warn(said, stacklevel=4)


SYNCHRONISING = _Synchronising()
STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    """Return the stream, of which one is enough where all work is done at once."""
    return STREAM


class _Memory(TorchFunctionMode):
    """Answers torch's functions of one thread as if some memory were a device's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], DEVICE)
        elif func is Tensor.cpu:
            func, args = Tensor.to, (args[0], torch.device("cpu"))
        elif func is Tensor.pin_memory:
            return _as_hosts(args[0].clone())
        kwargs = dict(kwargs or {})
        given = tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, Tensor)]
        is_devices = any(not _is_hosts(x) for x in tensors)
        if func in READS and is_devices:
            SYNCHRONISING.waits(func.__name__)
        kwargs.pop("pin_memory", None)
        asked = [place for x in given if (place := _place(x))]
        if asked:
            args, kwargs = tree_map(_on_host, (args, kwargs))
            if func is Tensor.to:
                self._moves(is_devices, asked[-1], kwargs)
            is_devices = asked[-1] == "cuda"
        if "out_dtype" in kwargs:  # which products on a CPU do not have
            wide = kwargs.pop("out_dtype")
            args = [x.to(wide) for x in args]
        result = func(*args, **kwargs)
        if not is_devices:
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and not any(x is one for one in tensors):
                    _as_hosts(x)
        return result

    def _moves(self, is_devices: bool, target: str, kwargs: dict[str, Any]) -> None:
        """Copy what moves between the two, and wait if the host then reads it."""
        if is_devices == (target == "cuda"):
            return
        kwargs["copy"] = True
        if is_devices and not kwargs.get("non_blocking"):
            SYNCHRONISING.waits("to")


def _device(x: Tensor) -> torch.device:
    place = PLACE(x)
    return place if place.type != "cpu" or _is_hosts(x) else DEVICE


def _record_stream(x: Tensor, stream: Stream) -> None:
    assert isinstance(stream, Stream)


def _memory() -> AbstractContextManager[Any]:
    """Return the mode, unless this thread is in it: one would undo what the other has noted."""
    is_open = any(isinstance(mode, _Memory) for mode in _get_current_function_mode_stack())
    return nullcontext() if is_open else _Memory()


ENGINE = torch.autograd.graph._engine_run_backward


def _backward(*args: Any, **kwargs: Any) -> Any:
    """Run a backward, whose functions the mode that began it would not be told of."""
    with _memory():
        return ENGINE(*args, **kwargs)


def _place(x: Any) -> str:
    """Return the device that an argument names: ``cuda``, ``cpu`` or none."""
    if isinstance(x, str):
        x = x.partition(":")[0]
        return x if x in ("cuda", "cpu") else ""
    if isinstance(x, torch.device):
        return x.type if x.type in ("cuda", "cpu") else ""
    return ""


def _on_host(x: Any) -> Any:
    return torch.device("cpu") if _place(x) else x


def _is_hosts(x: Tensor) -> bool:
    return "is_hosts" in vars(x)


def _made_on_host(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return _as_hosts(make(*args, **kwargs))


def _as_hosts(x: Tensor) -> Tensor:
    vars(x)["is_hosts"] = True
    return x


class Graph:
    """A graph by a tape, in two calls; what is captured runs."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        """Begin to note operators."""
        assert capture_error_mode == "thread_local"
        self._pool = {} if pool is None else pool
        self._tape = self._stack.enter_context(tape_of(self._pool))

    def capture_end(self) -> None:
        """End it.

        Raises:
            RuntimeError: if the host has read a value.
        """
        self._stack.close()

    def pool(self) -> dict[int, Tensor]:
        """Return the memory that later graphs share."""
        return self._pool

    def replay(self) -> None:
        """Run the operators again, but the first time, when they have just run."""
        self._tape.replay()


@contextmanager
def stream_of(stream: Stream | None) -> Iterator[None]:
    """Open a stream, in a thread of its own too."""
    with _memory():
        yield


@contextmanager
def opened() -> Iterator[None]:
    """Stand in for a device while open."""
    properties = SimpleNamespace(name=NAME, total_memory=MEMORY, major=9, minor=0)
    properties.multi_processor_count = 132
    changes: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: SYNCHRONISING.waits("synchronize"),
        "set_sync_debug_mode": lambda mode: setattr(SYNCHRONISING, "mode", mode),
        "is_current_stream_capturing": lambda: False,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "stream": stream_of,
        "device": lambda device: ExitStack(),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "_lazy_init": lambda: None,
    }
    missing = "this is a stand-in for a device, without Triton"
    with ExitStack() as stack:
        for name, change in changes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, change))
        for name in ("from_numpy", "frombuffer"):  # which no mode is told of
            made = partial(_made_on_host, getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, made))
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", _backward))
        of_tensors = {
            "device": property(_device),
            "is_cuda": property(lambda x: _device(x).type == "cuda"),
            "record_stream": _record_stream,
        }
        for name, change in of_tensors.items():
            stack.enter_context(mock.patch.object(Tensor, name, change))
        stack.enter_context(mock.patch.object(fused, "why_no_triton", lambda device: missing))
        stack.enter_context(mock.patch.object(grouped, "UNVERIFIED_DEVICES", ()))
        stack.enter_context(mock.patch.object(machine, "GPU_SIDES", machine.CPU_SIDES))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        for held in (lanes._side_stream, recording._recording_stream):
            held.cache_clear()
            stack.callback(held.cache_clear)
        stack.enter_context(_Memory())
        try:
            yield
        finally:
            SYNCHRONISING.mode = "default"
