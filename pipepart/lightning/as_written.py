"""Steps that run as they are written, in a run of one process where nothing has to be divided.

With one process, one stage and one micro-batch a pipeline is plain execution. So in such a run

- the plan is made with the first batch, and loaders and hooks are called when Lightning calls them;
- a step that cannot be recorded runs as it is written, as without pipepart, and a note gives the reason. With several stages,
  replicas or micro-batches the same step is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from pipepart.errors import CaptureError, ConfigError, PipepartError, PlanError
from pipepart.lightning.announce import tell
from pipepart.lightning.random_states import isolate_rng
from pipepart.lightning.strategy_options import StrategyOptions
from pipepart.lightning.watched_containers import is_plain_object
from pipepart.recording.model_state.reachable import OWN_NAMES, variables

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["AsWritten", "NotRecorded", "NotYet", "is_undivided", "not_recorded"]

_SHOWN = 300
"""Characters of a reason that a note shows."""
_DEPTH = 3
_REFUSALS = (CaptureError, ConfigError, PlanError)
"""Errors that a step or its batches cause, not the machine."""


class NotYet(Exception):
    """A step has raised an error of its own while it was recorded. All ranks raise it together."""

    _pipepart_told = True  # it is no failure of a rank that others have to hear of

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class NotRecorded(Exception):
    """A step cannot be recorded, and nothing has to be divided."""

    _pipepart_told = True

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def is_undivided(options: StrategyOptions, processes: int) -> bool:
    """Whether a run has one process and no option that asks for parts of the model, of batches or of a checkpoint."""
    return (
        processes == 1
        and options.microbatches in ("auto", 1)
        and options.chunks in ("auto", 1)
        and options.recompute in ("auto", False)
        and options.head in ("auto", "whole")
        and options.schedule == "auto"
        and options.batch_dim == 0
        and options.split_at is None
        and options.memory_limit is None
        and options.given_plan is None
        and options.example_batch is None
        and not (options.verify or options.sharded)
    )


@contextmanager
def not_recorded(undivided: bool) -> Iterator[None]:
    """Around the recording of a step. Where nothing has to be divided, a refusal becomes `NotRecorded`.

    Random numbers that the attempt has drawn are drawn again by the step.
    """
    if not undivided:
        yield
        return
    try:
        with isolate_rng():
            yield
    except NotYet as later:  # an error of the step itself; if it is one, the step raises it again
        raise NotRecorded(later.error) from later.error
    except _REFUSALS as refusal:
        raise NotRecorded(refusal) from refusal


class AsWritten:
    """The steps of one run that are not recorded."""

    def __init__(self, possible: bool) -> None:
        self.possible = possible
        """Whether nothing has to be divided, so that steps may run as they are written."""
        self.steps: set[str] = set()
        self._refusals: list[Exception] = []

    def add_or_raise(self, module: LightningModule, step: str, refusal: PipepartError) -> None:
        """Run a step as it is written, for a reason that is known before it is recorded; or raise the refusal."""
        if not self.possible:
            raise refusal
        self._refusals.append(refusal)
        if step not in self.steps:
            self.steps.add(step)
            self._tell(module, step, refusal)

    def refuse(self) -> None:
        """Steps cannot run as they are written after all: raise the first refusal, if there was one."""
        self.possible = False
        if self._refusals:
            raise self._refusals[0]

    def add(self, module: LightningModule, step: str, error: Exception, planned: bool) -> None:
        """Run a step as it is written from now on, with a note; or raise the refusal, if its attempts cannot be undone.

        `planned`: there is a plan of the training, which evaluations follow.
        """
        found = _iterator_of(module, step)
        if found and not isinstance(error, PipepartError):
            raise error
        if found:
            raise CaptureError(
                f"{error}\n  note: the step is not run as it is written either: {found} is an iterator, and attempts to record "
                "the step may have taken items from it. Take them in a hook"
            ) from error
        self.steps.add(step)
        self._tell(module, step, error, planned, ". Attempts to record it have run its code before")

    def _tell(
        self, module: LightningModule, step: str, error: Exception, planned: bool = False, tried: str = ""
    ) -> None:
        both = step == "training_step" and not planned
        tell(
            f"pipepart: {type(module).__name__}.{step} is not recorded: {_shown(error)}\n"
            f"note       {'it and the validation run' if both else 'it runs'} as written, as without "
            "pipepart: one process has nothing to divide, with one stage and one micro-batch. With more of them it is refused"
            f"{tried}\n"
        )


def _shown(error: Exception) -> str:
    text = " ".join(str(error).split())
    own = text if isinstance(error, PipepartError) else f"it raises {type(error).__name__} while it is recorded: {text}"
    return own if len(own) <= _SHOWN else f"{own[:_SHOWN]} ..."


def _iterator_of(module: nn.Module, step: str) -> str:
    """The name of an iterator that a step may read: of the modules, of their plain objects, of the variables that it uses."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in OWN_NAMES and (found := _iterator_in(f"{path}.{name}" if path else name, value, _DEPTH)):
                return found
    for place in variables((getattr(module, step, None),), module.named_modules()):
        try:
            value = place.read()
        except Exception:
            continue
        if found := _iterator_in(place.text, value, 1):
            return found
    return ""


def _iterator_in(name: str, value: Any, depth: int) -> str:
    if hasattr(type(value), "__next__"):
        return name
    if not depth:
        return ""
    items: list[tuple[str, Any]] = []
    if type(value) in (list, tuple):
        items = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    elif type(value) is dict:
        items = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif is_plain_object(value):
        items = [(f"{name}.{key}", item) for key, item in vars(value).items()]
    return next((found for text, item in items if (found := _iterator_in(text, item, depth - 1))), "")
