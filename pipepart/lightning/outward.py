"""Calls of a step that reach outside: ``print``, ``self.print``, loggers, warnings and log lines.

They are noted while a step is recorded and do nothing then. After each step they are repeated on rank 0, once for the batch,
with the values of the whole batch.
"""

from __future__ import annotations

import builtins
import copy
import importlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from pipepart.errors import CaptureError
from pipepart.recording.inputs import trees
from pipepart.recording.model_state.places import Attribute, Place, is_plain_value
from pipepart.recording.model_state.reachable import is_foreign
from pipepart.recording.model_state.reads import active
from pipepart.recording.recorded_run import texts
from pipepart.recording.recorded_run.contexts import user_line
from pipepart.recording.recorded_run.failures import Updates
from pipepart.recording.recorded_run.symbols import is_tracked
from pipepart.recording.recorded_run.tensors import holds_tensors

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["OUTWARD", "LoggerView", "checked", "loggers_of", "outward_noted", "repeat_outward"]

OUTWARD = "outward"
"""The kind of these effects."""
_LIBRARIES = {"wandb": ("log",), "mlflow": ("log_metric", "log_metrics", "log_image", "log_figure", "log_text")}
"""Functions of libraries that write to the current run, if the program uses them."""


class Says(Protocol):
    """Receiver of calls that reach outside."""

    def outward(self, name: str, value: Any, options: dict[str, Any]) -> None: ...

    def said(self, name: str, value: Any, options: dict[str, Any]) -> None: ...


# ---- while a step is recorded


@contextmanager
def outward_noted(says: Says) -> Iterator[None]:
    """Inside, for one run of a step, calls that reach outside are noted instead. The run has the rank of a single process."""
    warn = warnings.warn
    rank_zero: Any = importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only

    def note_warning(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
        if is_foreign(sys._getframe(1).f_globals.get("__name__")) or not _is_recorded("warns"):
            warn(message, category, stacklevel + 1, *args, **kwargs)
            return
        frame: Any = sys._getframe(max(1, stacklevel))
        kind = type(message) if isinstance(message, Warning) else category or UserWarning
        options = {"how": "warn", "category": kind, "file": frame.f_code.co_filename, "line": frame.f_lineno}
        note = says.said if _is_constant(str(message)) else says.outward
        note("warnings.warn", ((str(message),), {}), options)

    def note_record(logger: logging.Logger, record: logging.LogRecord) -> None:
        constant = _is_constant((record.msg, record.args))
        if constant or _is_recorded("logs"):
            note = says.said if constant else says.outward
            note(f"logging {record.name}", ((record.msg, record.args), {}), {"how": "record", "record": record})

    def note_print(*args: Any, **kwargs: Any) -> None:
        if _is_recorded("prints"):
            says.outward("print", (args, kwargs), {"how": "print"})

    with ExitStack() as stack:
        for holder, name, value in [
            (builtins, "print", note_print),
            (warnings, "warn", note_warning),
            (logging.Logger, "handle", note_record),
            *_library_calls(says),
        ]:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        stack.callback(setattr, rank_zero, "rank", getattr(rank_zero, "rank", None))
        rank_zero.rank = 0
        yield


def _library_calls(says: Says) -> Iterator[tuple[Any, str, Any]]:
    for library, names in _LIBRARIES.items():
        module = sys.modules.get(library)
        for name in names:
            if module is not None and hasattr(module, name):
                call = _noted(says, f"{library}.{name}", {"how": "library", "library": library, "name": name})
                yield module, name, call


def _noted(says: Says, name: str, options: dict[str, Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _is_recorded("logs")
        says.outward(name, (args, kwargs), dict(options))
        return Nothing(name)

    return call


def _is_constant(value: Any) -> bool:
    """Whether a value is no tensor or number of the run, and has none in it."""
    leaves = trees.leaves_of(value)
    flat = [item for leaf in leaves for item in (leaf if isinstance(leaf, (list, tuple)) else (leaf,))]
    return not any(isinstance(leaf, torch.Tensor) or is_tracked(leaf) or texts.has_marks(leaf) for leaf in flat)


def _is_recorded(does: str) -> bool:
    """True; inside a module that is one op, ask for a run that records the ops of that module."""
    reads = active()
    if reads is not None and not reads.watching:
        raise Updates(
            f"a module that is kept whole {does} at {user_line()}: it would do so once for each micro-batch, on its own stage. "
            "Do so in the step, or in a hook"
        )
    return True


def checked(name: str, value: Any) -> None:
    """Refuse arguments that hold tensors in objects: a recorded step cannot make such an object again."""
    for leaf in trees.leaves_of(value):
        plain = isinstance(leaf, (torch.Tensor, nn.Module)) or is_tracked(leaf) or is_plain_value(leaf)
        if not plain and not isinstance(leaf, (list, tuple)) and holds_tensors(leaf, 4):
            raise CaptureError(
                f"the step calls {name} with an object of the class {type(leaf).__name__}, made of tensors, at {user_line()}. "
                "A recorded step cannot make it again: pass the tensors, or make the call in a hook (on_train_batch_end)."
            )


class Nothing:
    """The result of a call that is made after the step."""

    _name: str

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _refuse(self, *args: Any) -> Any:
        raise CaptureError(
            f"the step uses the result of {self._name}, at {user_line()}. The call is made after the step: make it in a hook "
            "(on_train_batch_end), where its result is known."
        )

    __getattr__ = __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse


class LoggerView:
    """A logger, or a part of it, as a recorded step sees it: calls are noted, plain attributes can be read."""

    def __init__(self, says: Says, index: int, logger: Any, path: tuple[tuple[str, Any], ...] = ()) -> None:
        self.__dict__.update(_says=says, _index=index, _logger=logger, _path=path)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return LoggerView if self._path else type(self._logger)

    def _text(self) -> str:
        return "self.logger" + "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in self._path)

    def _inside(self, kind: str, key: Any) -> LoggerView:
        return LoggerView(self._says, self._index, self._logger, (*self._path, (kind, key)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._path and name != "experiment":
            value = getattr(self._logger, name)
            if is_plain_value(value):
                reads = active()
                if reads is not None:
                    reads.depends(Place(f"trainer.loggers[{self._index}].{name}", Attribute(self._logger), name), value)
                return value
        return self._inside("attr", name)

    def __getitem__(self, key: Any) -> Any:
        return self._inside("item", key)

    def __setattr__(self, name: str, value: Any) -> None:
        raise CaptureError(
            f"the step sets {self._text()}.{name}, at {user_line()}. A recorded step does not run this Python again: set it in "
            "a hook."
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self._inside("attr", "__setitem__")(key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _noted(self._says, self._text(), {"how": "logger", "index": self._index, "path": self._path})(
            *args, **kwargs
        )


def loggers_of(says: Says, trainer: Any) -> list[Any]:
    """The loggers of a trainer as a recorded step sees them."""
    found = [] if trainer is None else trainer.loggers
    return [LoggerView(says, index, logger) for index, logger in enumerate(found)]


# ---- after each step

_shown: dict[Any, dict[Any, Any]] = {}
"""Warnings that were shown at each place, as Python counts them."""


def repeat_outward(options: Mapping[str, Any], value: Any, module: LightningModule) -> None:
    """Make a noted call, on rank 0."""
    if not module.trainer.is_global_zero:
        return
    args, kwargs = value
    how = options["how"]
    if how == "print":
        print(*args, **kwargs)
    elif how == "self.print":
        module.print(*args, **kwargs)
    elif how == "warn":
        place = options["file"], options["line"]
        warnings.warn_explicit(args[0], options["category"], *place, registry=_shown.setdefault(place, {}))
    elif how == "record":
        record = copy.copy(options["record"])
        record.msg, record.args, record.created = args[0], args[1], time.time()
        logging.getLogger(record.name).handle(record)
    elif how == "library":
        getattr(sys.modules[options["library"]], options["name"])(*args, **kwargs)
    else:
        found: Any = module.trainer.loggers[options["index"]]
        for kind, key in options["path"]:
            found = getattr(found, key) if kind == "attr" else found[key]
        found(*args, **kwargs)
