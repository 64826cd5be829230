"""Processes that end with the process that has started them, however the starting process ends.

The kernel of Linux sends a signal to a process whose parent ends, if the process has requested it. If the parent had ended
before that request, its process id shows it. Other systems have the second check only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import spawn

__all__ = ["RANK_0", "check_rank_0", "end_with_parent", "outlive_parent", "spawned_tied", "tied"]

RANK_0 = "PIPEPART_RANK_0"
"""The variable with the process id of rank 0, for the ranks that it starts."""
_outlived: set[int] = set()

_SET_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_START = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_SET_SIGNAL}, {int(signal.SIGKILL)})
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""A program that runs another program in its place. The signal of the parent stays set, from before the first import."""


def end_with_parent(parent: int) -> None:
    """Let this process be killed when its parent ends, and end it now if the parent with this id has ended already."""
    _set_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Let this process continue when its parent ends. `check_rank_0` notices the end of a parent that is rank 0."""
    if os.environ.get(RANK_0) == str(os.getppid()):
        _outlived.add(os.getppid())
    _set_signal(0)


def check_rank_0() -> None:
    """Raise an error if rank 0 has started this process and has ended, so that waiting for it is in vain."""
    if _outlived and os.getppid() not in _outlived:
        raise ConnectionResetError("rank 0, which has started this process, has ended: Connection closed by peer")


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` as a child that is killed when this process ends, also while it starts.

    This works only on Linux and in the main thread: the kernel sends the signal when the thread that started the child ends.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *command]


@contextmanager
def spawned_tied() -> Iterator[None]:
    """Tie the processes that `multiprocessing` spawns inside to this process."""
    before = spawn.get_command_line
    spawn.get_command_line = lambda **options: tied(before(**options))
    try:
        yield
    finally:
        spawn.get_command_line = before


def _set_signal(number: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET_SIGNAL, number)
