"""The end of a process that has talked to others: the threads of its process groups rest before Python goes.

A thread of gloo lets go of the tensors of an operation a moment after it has said that the operation is done, and needs
the interpreter for tensors that Python knows. If the interpreter is shutting down by then, Python ends the thread in the
middle of a C++ destructor, and the process aborts after a good run ("terminate called without an active exception").
So the groups are destroyed while Python still works, which waits for their threads; threads of groups that somebody
else still holds get a moment to come to rest.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["leave_after_failure", "release_groups", "released_with"]

_PATIENCE = 10.0  # seconds for threads to come to rest
_releases: list[weakref.finalize[..., Any]] = []
_failed: list[bool] = []


def released_with(owner: object, release: Callable[..., None], *args: Any) -> None:
    """Call `release(*args)` when nobody uses `owner` any more, or before Python ends, if all went well until then."""
    if not _releases:
        atexit.register(_leave, os.getpid())
    _releases[:] = [release for release in _releases if release.alive]
    _releases.append(weakref.finalize(owner, release, *args))
    _releases[-1].atexit = False  # not at the whim of the order in which others have registered


def release_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Close the sockets of groups that nobody uses any more; torch keeps every group until the process ends.

    Only what each rank can do by itself: NCCL ends communicators together, so those stay.
    """
    for group in groups:
        with suppress(Exception):  # the job may be over already
            if group is not None and dist.is_initialized() and dist.get_backend(group) == "gloo":
                dist.destroy_process_group(group)


def leave_after_failure() -> None:
    """Another rank was lost or this one has failed: do not wait for operations that may never end."""
    _failed.append(True)


def _leave(process: int) -> None:
    if os.getpid() != process:  # a fork has none of the threads
        return
    if not _failed and not hasattr(sys, "last_value"):  # the latter: an exception that nobody has caught
        while _releases:
            release = _releases.pop()
            found = release.peek()
            release()
            if found is not None:
                _forget(found[0])
            del release, found
        with suppress(Exception):
            if dist.is_initialized() and dist.get_backend() == "gloo":
                dist.destroy_process_group()
    _rest(_PATIENCE)


def _forget(owner: Any) -> None:
    """Take the groups out of an object that lives on, so that they end now."""
    held = vars(owner)
    for name in [name for name, value in held.items() if isinstance(value, dist.ProcessGroup)]:
        held[name] = None


def _rest(patience: float) -> None:
    """Wait until the threads of gloo sleep and have not been awake since the last look (Linux only)."""
    deadline, before = time.monotonic() + patience, None
    while time.monotonic() < deadline:
        now = _threads()
        if not now or (now == before and all(state.startswith("S") for state, _ in now.values())):
            return
        before = now
        time.sleep(0.01)  # without the interpreter lock, so that a thread that waits for it can go on


def _threads() -> dict[str, tuple[str, str]]:
    """State and number of switches of each thread of gloo in this process."""
    found = {}
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                if "gloo" in (task / "comm").read_text():
                    lines = dict(
                        line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line
                    )
                    switches = lines["voluntary_ctxt_switches"] + lines["nonvoluntary_ctxt_switches"]
                    found[task.name] = lines["State"].strip(), switches
    return found
