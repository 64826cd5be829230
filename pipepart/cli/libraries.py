"""The import of torch and Lightning, on which every command that composes a configuration waits for seconds."""

from __future__ import annotations

import gc
import sys

from pipepart.cli.console import quiet_libraries

__all__ = ["load_libraries"]


def load_libraries() -> None:
    """Silence torch and Lightning and import them, with the strategy, without the collector of cyclic garbage.

    The collector would find nothing and take a fifth of the time. All that has been imported lives as long as the process,
    so later collections leave it out.
    """
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
