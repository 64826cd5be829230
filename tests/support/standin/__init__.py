"""A stand-in for a GPU: a device of torch with real values in host memory that obeys the rules of a GPU.

It refuses to mix devices, has a memory size, streams and events, counts the waits of the host for the device, and finds
work on streams that is not ordered. Values are computed at once; what is late on a GPU is an error here. `enable()`
changes the process for ever, so tests call it in processes of their own (`run_standin`).
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from support.standin.build import built_library, compile_seconds, unavailable

__all__ = [
    "built_library",
    "compile_seconds",
    "counting",
    "enable",
    "host_waits",
    "keep_stacks",
    "races",
    "raise_races",
    "reset_all",
    "reset_host_waits",
    "reset_races",
    "set_memory",
    "stacks",
    "unavailable",
]

_TYPE = 20
"""The number of the device type that torch keeps for devices from outside (PrivateUse1)."""
_stacks: list[str] = []
_callback: Any = None


@cache
def _library() -> ctypes.PyDLL:
    library = ctypes.PyDLL(str(built_library()))
    for name in ("standin_host_waits", "standin_races"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in ("standin_memory_limit", "standin_allocated", "standin_peak"):
        getattr(library, name).restype = ctypes.c_size_t
    library.standin_set_memory_limit.argtypes = [ctypes.c_int, ctypes.c_size_t]
    library.standin_default_generator.restype = ctypes.py_object
    return library


@cache
def enable() -> None:
    """Make the device known to torch as `standin`. The number of devices is taken from STANDIN_DEVICES, else 4."""
    import torch

    from support.standin.device_module import make_module

    library = _library()
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", make_module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    if torch.distributed.is_available():
        from support.standin.process_group import register_group

        register_group()


def host_waits() -> list[str]:
    """The op or call of each wait of the host for a device since the last reset."""
    return _library().standin_host_waits().decode().splitlines()


def reset_host_waits() -> None:
    """Forget the waits that were counted."""
    _library().standin_reset_host_waits()
    _stacks.clear()


@contextmanager
def counting() -> Iterator[list[str]]:
    """A list that holds, after the block, the waits of the host within it."""
    before = len(host_waits())
    waits: list[str] = []
    try:
        yield waits
    finally:
        waits.extend(host_waits()[before:])


def keep_stacks(keep: bool = True) -> None:
    """Keep the Python stack of each wait from now on."""
    global _callback
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

    def remember(name: bytes) -> None:
        _stacks.append(f"{name.decode()}\n" + "".join(traceback.format_stack()[:-1]))

    _callback = kind(remember) if keep else None
    _library().standin_on_wait(_callback if keep else ctypes.c_void_p(None))


def stacks() -> list[str]:
    """The Python stacks of the counted waits, if they are kept."""
    return list(_stacks)


def races() -> list[str]:
    """The races between streams that were found."""
    return _library().standin_races().decode().splitlines()


def reset_races() -> None:
    """Forget the races that were found, and memory that was freed too early."""
    _library().standin_reset_races()


def raise_races(raise_them: bool = True) -> None:
    """Raise at a race (as it is from the start), or only keep it in the list."""
    _library().standin_raise_races(int(raise_them))


def reset_all() -> None:
    """Waits, races, memory sizes and current streams as they were at the start of the process."""
    import torch

    reset_host_waits()
    reset_races()
    raise_races()
    keep_stacks(False)
    set_memory(1 << 30)
    for index in range(_library().standin_device_count()):
        _library().standin_reset_peak(index)
        torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=index, device_type=_TYPE))


def set_memory(bytes_: int, device: int | None = None) -> None:
    """The size of the memory of one device, or of all."""
    library = _library()
    for index in range(library.standin_device_count()) if device is None else [device]:
        library.standin_set_memory_limit(index, bytes_)
