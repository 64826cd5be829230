"""The end of a process with process groups: their threads stop before the interpreter does.

A thread of gloo releases the tensors of an operation shortly after it has reported the operation as done, and needs the
interpreter to release tensors that Python knows. If the interpreter is shutting down by then, it ends the thread inside a
C++ destructor, and the process aborts after a successful run ("terminate called without an active exception"). So the
groups are destroyed while the interpreter still works, which waits for their threads. Threads of groups that other code
still holds get a moment to become idle.
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

_PATIENCE = 10.0  # seconds for threads to become idle
_AFTER_FAILURE = 2.0  # the same after a failure: the job must end
_releases: list[weakref.finalize[..., Any]] = []
_failed: list[bool] = []


def released_with(owner: object, release: Callable[..., None], *args: Any) -> None:
    """Call `release(*args)` when `owner` is collected or, unless the process has failed, before the interpreter ends."""
    if not _releases:
        atexit.register(_leave, os.getpid())
    _releases[:] = [release for release in _releases if release.alive]
    _releases.append(weakref.finalize(owner, release, *args))
    _releases[-1].atexit = False  # `_leave` calls it: the order of other exit handlers does not matter


def release_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Destroy groups that are not used any more; torch keeps every group until the process ends.

    A rank destroys gloo groups alone. Backends of accelerators would wait for all ranks, so their communicators are aborted
    first: nothing is under way on them any more.
    """
    for group in groups:
        with suppress(Exception):  # the default group may be destroyed already
            if group is not None and dist.is_initialized():
                if dist.get_backend(group) != "gloo":
                    group.abort()
                dist.destroy_process_group(group)


def leave_after_failure() -> None:
    """Do not wait at the end of the process for operations that may never finish, since a rank has failed."""
    _failed.append(True)


def _leave(process: int) -> None:
    if os.getpid() != process:  # a fork has none of the threads
        return
    failed = bool(_failed) or hasattr(sys, "last_value")  # `last_value`: the process ends by an exception
    if not failed:
        while _releases:
            release = _releases.pop()
            found = release.peek()
            release()
            if found is not None:
                _forget(found[0])
            del release, found
        with suppress(Exception):
            if dist.is_initialized():
                release_groups([dist.group.WORLD])
    _wait_for_threads(_AFTER_FAILURE if failed else _PATIENCE)


def _forget(owner: Any) -> None:
    """Remove the groups from an object that stays alive, so that they end now."""
    held = vars(owner)
    for name in [name for name, value in held.items() if isinstance(value, dist.ProcessGroup)]:
        held[name] = None


def _wait_for_threads(patience: float) -> None:
    """Wait until the threads of gloo sleep and have not run since the last look (Linux only)."""
    deadline, before = time.monotonic() + patience, None
    while time.monotonic() < deadline:
        now = _threads()
        if not now or (now == before and all(state.startswith("S") for state, _ in now.values())):
            return
        before = now
        time.sleep(0.01)  # releases the interpreter lock, so that a thread that waits for it can continue


def _threads() -> dict[str, tuple[str, str]]:
    """Return the state and the number of context switches of each thread of gloo in this process."""
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
