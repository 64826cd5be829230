"""The import of torch and Lightning, on which every command that composes a configuration waits for seconds."""

from __future__ import annotations

import gc
import os
import sys

from pipepart.cli.console import quiet_libraries

__all__ = ["count_threads", "load_libraries", "threads_after_import"]

threads_after_import: int | None = None
"""The number of threads of this process after `load_libraries` has imported the libraries; None if others have."""


def count_threads() -> int:
    """Return the number of threads of this process, also of those that libraries have started (Linux only)."""
    return len(os.listdir("/proc/self/task"))


def load_libraries() -> None:
    """Silence torch and Lightning and import them, with the strategy, without the collector of cyclic garbage.

    The collector would find nothing and take a fifth of the time. All that has been imported lives as long as the process,
    so later collections leave it out.
    """
    global threads_after_import
    if "pipepart.lightning" in sys.modules:
        return
    quiet_libraries()
    was_on = gc.isenabled()
    gc.disable()
    try:
        import lightning.pytorch  # noqa: F401

        import pipepart.lightning  # noqa: F401
    finally:
        if was_on:
            gc.enable()
        gc.freeze()
    if sys.platform == "linux":
        threads_after_import = count_threads()
