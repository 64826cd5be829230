"""Files that a step writes: refused by name, since a recorded step does not run its Python again."""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pipepart.errors import CaptureError
from pipepart.recording.model_state.reachable import is_foreign
from pipepart.recording.recorded_run.contexts import user_line

__all__ = ["files_refused"]


@contextmanager
def files_refused() -> Iterator[None]:
    """Inside, for one run of a step, code of the user can open files for reading only."""
    opened, save = builtins.open, torch.save

    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and set(mode) & set("wax+") and _is_user():
            raise _refusal(f"opens {str(file)!r} for writing")
        return opened(file, mode, *args, **kwargs)

    def save_file(value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, io.BytesIO):
            return save(value, file, *args, **kwargs)
        raise _refusal(f"calls torch.save with {str(file)!r}")

    with ExitStack() as stack:
        for holder, name, value in ((builtins, "open", open_file), (io, "open", open_file), (torch, "save", save_file)):
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def _is_user() -> bool:
    """Whether code of the user opens the file, directly or through Python and the libraries of torch."""
    frame: Any = sys._getframe(2)
    while frame is not None and is_foreign(frame.f_globals.get("__name__")):
        if frame.f_globals.get("__name__", "").startswith(("importlib", "pipepart.")):
            return False
        frame = frame.f_back
    return frame is not None


def _refusal(does: str) -> CaptureError:
    return CaptureError(
        f"the step {does}, at {user_line()}. A recorded step does not run this Python again: do so in a hook "
        "(on_train_batch_end, on_validation_batch_end), which gets the result of the step, or log the values."
    )
