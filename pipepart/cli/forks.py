"""Ranks that are forks of the command: it has imported torch and Lightning already, which takes each process seconds.

A fork has only the thread that made it. What other threads held then stays locked, and a pool of threads that libraries count
on is missing. So a rank is forked only from a process in which no thread has started since the imports, and never where there
is an accelerator, whose driver does not survive a fork. Everywhere else ranks are started anew.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pipepart.cli import libraries

__all__ = ["can_fork", "run_fresh"]


def can_fork() -> bool:
    """Return whether this process can fork ranks."""
    if sys.platform != "linux" or libraries.threads_after_import is None or threading.active_count() > 1:
        return False
    if libraries.count_threads() > libraries.threads_after_import:
        return False
    from pipepart.devices import accelerator

    return accelerator() is None


def run_fresh(function: Callable[..., Any], *args: Any) -> None:
    """Call a function in a fork, with the handlers, random numbers and threads of a process that was started anew."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # the parent's end the whole job
        signal.signal(number, signal.SIG_DFL)
    # What the parent has to do at its end is not for this process. The interpreter of a fork does not call the functions at
    # its end, so they are called here.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    _set_random_numbers()
    _set_threads()
    function(*args)
    atexit._run_exitfuncs()


def _set_random_numbers() -> None:
    """Python's own generator and that of NumPy start anew in each process, that of torch with the same seed in all."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.default_generator.manual_seed(torch.default_generator.initial_seed())


def _set_threads() -> None:
    """Torch has read the number of threads before the command has shared the cores among the ranks."""
    import torch

    with suppress(ValueError):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
