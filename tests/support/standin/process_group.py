"""The process group of the stand-in device: a backend of torch.distributed called `standin_ccl` with the rules of NCCL.

Communicators of two ranks are made at the first send or receive between them, which blocks the host of both until both
have come there. A group that was made with `device_id` has one communicator, and one order, for everything. Ops of one
communicator run one after the other; tags are ignored; int16 is refused. `wait()` orders the current stream and never
raises: who waits for a lost rank waits until the group is aborted.
"""

from __future__ import annotations

import ctypes
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

__all__ = ["BACKEND", "failures", "register_group", "reset_failures"]

BACKEND = "standin_ccl"


def _library() -> ctypes.PyDLL:
    from support.standin import _library

    library = _library()
    library.standin_new_group.restype = ctypes.py_object
    library.standin_new_group.argtypes = [ctypes.py_object, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    library.standin_failures.restype = ctypes.c_char_p
    return library


@cache
def register_group() -> None:
    """Make the backend known to torch.distributed, as the one of the device `standin`."""

    def create(options: Any, _: Any) -> Any:
        milliseconds = int(options.timeout / timedelta(milliseconds=1))
        return _library().standin_new_group(options.store, options.group_rank, options.group_size, milliseconds)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["standin"])


def failures() -> list[str]:
    """What went wrong in communicators of this process without being raised: sends and receives that do not match."""
    return _library().standin_failures().decode().splitlines()


def reset_failures() -> None:
    """Forget the failures."""
    _library().standin_reset_failures()
