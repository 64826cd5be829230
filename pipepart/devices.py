"""Devices: everything that depends on the type of a device is here, behind `torch.accelerator`.

No other file names a type of device other than the CPU, or a backend of one. A device of another library (PrivateUse1) works
if it registers a device module, a backend of `torch.distributed` and, for streams, a device guard.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.errors import ConfigError
from pipepart.machine import peak_memory, shared_cores

__all__ = [
    "ATTENTION_SWITCHES",
    "Memory",
    "Stopwatch",
    "accelerator",
    "autocast_types",
    "backend_for",
    "backend_problem",
    "build_of_torch",
    "computes_on_host",
    "current_stream",
    "device_backend",
    "device_count",
    "device_name",
    "generators",
    "kept_draws",
    "limit_threads",
    "local_device",
    "memory_of",
    "move_module",
    "new_stream",
    "on_host",
    "on_stream",
    "peak_memory_of",
    "pinned",
    "read_together",
    "synchronize",
    "to_device",
    "usable_autocast",
    "used_on",
]

_NOT_FOR_RANKS = frozenset({"mps"})
"""Types of which a host has one device, without transfers between processes: used only if they are asked for by name."""
_WITHOUT_STREAMS = frozenset({"cpu", "mps"})
_DEFAULT_TYPES = ("cuda", "xpu", "hpu", "npu", "mps")
"""Types that torch or a well-known library has. The accelerator of this process is one of them, or another one."""
_PRODUCERS = {"cuda": "nvidia-smi", "xpu": "xpu-smi", "hpu": "hl-smi", "npu": "npu-smi"}
"""The program of each producer that lists the devices which the driver sees."""

_attention: Any = torch.backends.cuda
ATTENTION_SWITCHES: tuple[tuple[Any, Any], ...] = (
    (_attention.flash_sdp_enabled, _attention.enable_flash_sdp),
    (_attention.mem_efficient_sdp_enabled, _attention.enable_mem_efficient_sdp),
    (_attention.math_sdp_enabled, _attention.enable_math_sdp),
    (_attention.cudnn_sdp_enabled, _attention.enable_cudnn_sdp),
)
"""The switches of attention kernels. They hold for every type of device, and torch keeps them with one of them."""


@dataclass(frozen=True)
class Memory:
    """The memory of a device in bytes."""

    free: int
    total: int


# ---- the devices of this process


def accelerator() -> str | None:
    """Return the type of the accelerator on which ranks of this process can run; None if there is only the CPU."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None or found.type in _NOT_FOR_RANKS else found.type


def computes_on_host(device: torch.device) -> bool:
    """Return whether the host computes itself, so that no work of the device is ever outstanding."""
    return device.type == "cpu"


def device_count(kind: str | None = None) -> int:
    """Return the number of devices of a type (default: of the accelerator) on this host; 0 without an accelerator."""
    kind = kind or accelerator()
    if kind is None:
        return 0
    return int(torch.get_device_module(kind).device_count())


def local_device(local_rank: int, wanted: str | torch.device | None = None) -> torch.device:
    """Return the device of a process and make it the current one: `wanted`, else its own accelerator, else the CPU.

    A type without an index ("cuda") means the device with the number of the process on its host.
    """
    kind = accelerator() if wanted is None else _type_of(wanted)
    if kind is None or kind == "cpu":
        return torch.device("cpu")
    given = torch.device(wanted).index if wanted is not None else None
    index, count = local_rank if given is None else given, device_count(kind)
    if index >= count:
        raise ConfigError(
            f"the process with number {local_rank} of this host needs {kind}:{index}, but the host has {count} device(s) of "
            f"this type. Start at most {count} process(es) per host, make more devices visible, or use the CPU "
            "(device='cpu', or accelerator='cpu' in a Trainer)."
        )
    device = torch.device(kind, index)
    torch.get_device_module(kind).set_device(device)
    return device


def _type_of(wanted: str | torch.device) -> str:
    try:
        kind = torch.device(wanted).type
    except RuntimeError as error:
        raise ConfigError(f"device={wanted!r} is no device of torch: {str(error).splitlines()[0]}") from error
    if kind != "cpu" and not getattr(torch.get_device_module(kind), "is_available", lambda: False)():
        raise ConfigError(
            f"device={str(wanted)!r}: this build of torch, or this host, has no {kind} device. Use device='cpu', or check "
            "the driver and the build of torch with `pipepart doctor`."
        )
    return kind


def device_name(device: torch.device) -> str:
    """Return the name of a device as its producer gives it; its type where it gives none."""
    with suppress(AttributeError, RuntimeError):
        return str(torch.get_device_module(device).get_device_name(device))
    return device.type


def build_of_torch() -> tuple[str, str] | None:
    """Return the type of accelerator that torch was built for and the program that lists its devices; None for none."""
    if torch.version.cuda or getattr(torch.version, "hip", None):
        return "cuda", _PRODUCERS["cuda"]
    return ("xpu", _PRODUCERS["xpu"]) if getattr(torch.version, "xpu", None) else None


def memory_of(device: torch.device) -> Memory | None:
    """Return the free and the total memory of an accelerator; None for the CPU, and where torch cannot tell."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        free, total = module.mem_get_info(device)
        return Memory(int(free), int(total))
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        free, total = torch.accelerator.get_memory_info(device)
        return Memory(int(free), int(total))
    with suppress(AttributeError, RuntimeError):
        total = int(module.recommended_max_memory())
        return Memory(total - int(module.current_allocated_memory()), total)
    return None


def peak_memory_of(device: torch.device) -> int:
    """Return the bytes that this process has used at most: on the device, or in the host's memory for the CPU."""
    if device.type == "cpu":
        return peak_memory()
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return int(torch.accelerator.max_memory_allocated(device))


def limit_threads(processes_here: int) -> None:
    """Share the cores of this host among its processes, so that stages do not compete for cores.

    A number of threads that is set by OMP_NUM_THREADS is kept.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(shared_cores(processes_here))


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module to `device`. Its parameters stay the same objects, so that ties and optimizers hold.

    For some types of devices torch makes new parameters, one for each use of a tied one. Tensors on the meta device stay there:
    they have no values yet.
    """
    for parameter in module.parameters():
        if not parameter.is_meta and parameter.device != device:
            _move_parameter(parameter, device)
    # Modules may move more than their parameters and buffers: states of metrics, weights of recurrent layers in one piece.
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        module.to(device)


def _move_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    gradient, parameter.grad = parameter.grad, None
    values = parameter.detach().to(device)
    if _same_kind(parameter.device, device):
        parameter.data = values
    else:
        torch._C._swap_tensor_impl(parameter, nn.Parameter(values, parameter.requires_grad))  # type: ignore[attr-defined]
    parameter.grad = None if gradient is None else gradient.to(device)


@cache
def _same_kind(one: torch.device, other: torch.device) -> bool:
    """Return whether a tensor can take the memory of one on another device."""
    return bool(torch._has_compatible_shallow_copy_type(torch.empty(0, device=one), torch.empty(0, device=other)))


# ---- backends


def device_backend(device: torch.device) -> str:
    """Return the backend of `torch.distributed` for tensors on `device`."""
    found = dist.Backend.default_device_backend_map.get(device.type)
    if found is None:
        raise ConfigError(
            f"torch.distributed has no backend for {device.type} devices. Import the library that provides it before the job "
            "starts, or use the CPU."
        )
    return str(found)


def backend_for(device: torch.device) -> str:
    """Return the backends of a group for tensors on `device` and in host memory, which carries plain objects."""
    own = device_backend(device)
    return own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


def backend_problem(kind: str) -> str | None:
    """Return why tensors on devices of this type cannot be sent between processes; None if they can."""
    name = dist.Backend.default_device_backend_map.get(kind)
    if name is None:
        return f"torch.distributed has no backend for {kind}"
    return None if dist.is_backend_available(name) else f"{name} is not in this build of torch"


# ---- random numbers and autocast


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators of torch that ops on `device` draw from."""
    found = [torch.default_generator]
    if device.type != "cpu":
        found.append(_default_generator(device))
    return found


def _default_generator(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    with suppress(AttributeError):
        made = module.default_generators
        if not made:  # the device is initialised at its first use
            module.init()
            made = module.default_generators
        return made[device.index if device.index is not None else module.current_device()]
    return module._get_default_mps_generator()  # the one device of its type


@contextmanager
def kept_draws() -> Iterator[None]:
    """Leave the generators of torch, on the CPU and on all accelerators, as before."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = range(device_count(kind.type)) if kind is not None else ()
    with torch.random.fork_rng(devices, device_type=kind.type if kind is not None else _DEFAULT_TYPES[0]):
        yield


@cache
def usable_autocast() -> tuple[str, ...]:
    """Return the types of devices of this process, whose autocast changes dtypes."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if found is None else ("cpu", found.type)


@cache
def autocast_types() -> tuple[str, ...]:
    """Return the types of devices whose autocast can be on. Programs for GPUs switch it on without a GPU, too."""
    return tuple(dict.fromkeys((*usable_autocast(), _DEFAULT_TYPES[0])))


# ---- streams, events, clocks


def synchronize(device: torch.device) -> None:
    """Let the host wait until the device has done all its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream of an accelerator; None for a device without streams."""
    return None if device.type in _WITHOUT_STREAMS else torch.Stream(device=device)


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream to which ops on `device` go now; None for a device without streams."""
    return None if device.type in _WITHOUT_STREAMS else torch.accelerator.current_stream(device)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Return a context in which ops go to `stream`; without a stream it does nothing."""
    return nullcontext() if stream is None else stream


def used_on(tensor: torch.Tensor, stream: torch.Stream | None) -> None:
    """Keep the memory of a tensor until `stream` has done the work that it has now, wherever the tensor is released."""
    if stream is not None:
        tensor.record_stream(stream)


def read_together(scalars: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of tensors without dimensions. The host waits once for an accelerator, not once for each."""
    return [scalar.item() for scalar in on_host(scalars)]


def on_host(values: Sequence[Any]) -> list[Any]:
    """Return values with tensors that have no dimensions in host memory. The host waits once for an accelerator."""
    away = [v for v in values if isinstance(v, torch.Tensor) and v.dim() == 0 and not computes_on_host(v.device)]
    if not away:
        return list(values)
    raw = torch.cat([scalar.detach().reshape(1).view(torch.uint8) for scalar in away]).cpu()
    parts = raw.split([scalar.element_size() for scalar in away])
    here = {id(scalar): part.clone().view(scalar.dtype).reshape(()) for part, scalar in zip(parts, away)}
    return [here.get(id(value), value) for value in values]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device`. Neither the host nor the work of the device waits for the copy of a tensor of the host."""
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host in memory from which `device` copies without the host waiting."""
    if device.type in _WITHOUT_STREAMS or tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()


class Stopwatch:
    """Times of work on a device, on the clock of its process, without waiting for the device while it works."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin: Any = None
        if device.type not in _WITHOUT_STREAMS:
            synchronize(device)
            self._origin = self._event()
            synchronize(device)
        self._began = time.perf_counter()

    def _event(self) -> Any:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def mark(self) -> Any:
        """Return a mark at this point in the queue of the device. A device without events is waited for."""
        if self._origin is not None:
            return self._event()
        synchronize(self._device)
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """Return the time at which the device reached `mark`, on the clock of `time.perf_counter`."""
        if self._origin is None:
            return float(mark)
        if not mark.query():
            mark.synchronize()
        return float(self._began + self._origin.elapsed_time(mark) / 1000)

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds from one mark to a later one. Devices count them in single precision, so this is more exact for
        short times than the difference of two `seconds`."""
        if self._origin is None:
            return float(end - start)
        if not end.query():
            end.synchronize()
        return float(start.elapsed_time(end) / 1000)
