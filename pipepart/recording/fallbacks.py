"""Fallbacks that are tried, in order, when a call cannot be recorded as it is.

A fallback changes one of the `Settings`, and the call is recorded again. The fallbacks in `FALLBACKS` follow a failed run.
Others follow a run that has succeeded but may be wrong: `found_caches`, `suspect` and the settings ``warm`` (a second run
at another size has other constants) and ``single`` (the proof fails for one sample).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording.model_state import memos, state
from pipepart.recording.recorded_run import caches
from pipepart.recording.recorded_run.caches import CachedFunction
from pipepart.recording.recorded_run.failures import (
    ChangesWhole,
    Converted,
    DataDependent,
    DrawsOutside,
    FromNumpy,
    Keeps,
    NotRecordable,
    Unsettled,
    Updates,
)
from pipepart.recording.recorded_run.python_state import is_watched
from pipepart.recording.recorded_run.runs import Call, Run, Settings, copy_leaf, eager

__all__ = ["Failure", "Retry", "fall_back", "found_caches", "keep_whole", "remember", "suspect"]

_WHOLE_LIMIT = 0.4
"""Largest share of the parameters in a module that is kept whole."""
_TRIED = 4
"""Number of fallbacks that the final error lists."""


class Retry(Exception):
    """The settings were changed: record again."""


@dataclass(frozen=True)
class Failure:
    """A failed run of a call: its inputs, its error, and the modules that were running, the innermost last."""

    call: Call
    leaves: list[Any]
    mode: Any
    error: Exception
    modules: list[str]

    @property
    def text(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Fallback:
    """One way to record a call whose run has failed."""

    name: str
    condition: type[Exception] | tuple[type[Exception], ...]
    """Class of the errors for which this fallback is tried."""
    effect: Callable[[Failure, Settings], bool]
    """Function that changes the settings. It returns whether they have changed, so that recording again may help."""


def _settle(failure: Failure, settings: Settings) -> bool:
    """Call the model once and keep the plain attributes and hooks that it sets, as any call of the user would."""
    if settings.settled:
        return False
    settings.settled = True
    with state.preserved(failure.call.root), failure.mode or nullcontext():
        failure.call.run([copy_leaf(leaf) for leaf in failure.leaves])
        # What the caller sets after each step itself must not be set once more.
        modules = failure.call.root.named_modules()
        after = state.Snapshot((p, m) for p, m in modules if not getattr(type(m), "_pipepart_sets", False))
    after.restore_setup()
    _put_back(failure.call.root, settings)
    return True


def _put_back(root: nn.Module, settings: Settings) -> None:
    """Give attributes that the caller sets after each call the values from before anything was run."""
    for path, name in settings.attributes & settings.initial.keys():
        vars(root.get_submodule(path))[name] = settings.initial[path, name]


def _repeat_attributes(failure: Failure, settings: Settings) -> bool:
    """Leave attributes of submodules that change in each call to the caller, who sets them after each call."""
    new = {place for place in getattr(failure.error, "attributes", ()) if place[0]} - settings.attributes
    root = failure.call.root
    if not new or not is_watched(root) or isinstance(failure.error, ChangesWhole):
        return False
    settings.opened.update(path for path, _ in new)
    settings.attributes |= new
    _put_back(root, settings)  # the call that set the model up may have changed them
    return True


def _switch_on(setting: str) -> Callable[[Failure, Settings], bool]:
    def effect(failure: Failure, settings: Settings) -> bool:
        before = bool(getattr(settings, setting))
        setattr(settings, setting, True)
        return not before

    return effect


def _open(failure: Failure, settings: Settings) -> bool:
    """Record the ops of a module that is one op otherwise."""
    path = failure.modules[-1]
    new = path not in settings.opened
    settings.opened.add(path)
    return new


def _keep_function(failure: Failure, settings: Settings) -> bool:
    function = failure.error.function  # type: ignore[attr-defined]
    if function is None or function in settings.functions:
        return False
    settings.functions.append(function)
    settings.history.append(f"kept the function {function.__qualname__} whole ({failure.text[:160]})")
    settings.watching = True
    return True


def _keep_module(failure: Failure, settings: Settings) -> bool:
    """Keep the innermost module whole; if it is kept already, the one around it."""
    root = failure.call.root
    for path in reversed(failure.modules):
        if path and keep_whole(root, path, settings, failure.text):
            for other, why in getattr(failure.error, "also", ()):
                if not any(other.startswith(f"{kept}.") for kept in settings.whole):
                    keep_whole(root, other, settings, why)
            return True
        if path and path not in settings.whole:
            break
    return False


FALLBACKS = (
    Fallback("start from the state that one call leaves", Unsettled, _settle),
    Fallback("set attributes of submodules after each call", (Unsettled, Keeps), _repeat_attributes),
    Fallback("follow the results of float() and int()", Converted, _switch_on("converting")),
    Fallback("record the ops of the module that updates its buffers", Updates, _open),
    Fallback("find the module that draws random numbers", DrawsOutside, _switch_on("watching")),
    Fallback("find the function that makes the numpy array", FromNumpy, _switch_on("makers")),
    Fallback("keep this function whole", FromNumpy, _keep_function),
    Fallback("keep the module whole", Exception, _keep_module),
    Fallback("use the code paths for torch.compile", DataDependent, _switch_on("compiling")),
    Fallback("fix branches that depend on data, with a check", DataDependent, _switch_on("guards")),
)
"""Fallbacks for a failed run, in the order in which they are tried."""


_DRAW = (
    "draw the number with torch, or in a hook before the step, which the step then reads (`def on_train_batch_start(self, "
    "batch, batch_idx): self.lam = np.random.beta(1, 1)`), "
)
_SPLIT = "put this part into a submodule with at most 40 % of the parameters (it is then kept whole)"


def fall_back(failure: Failure, settings: Settings) -> NoReturn:
    """Apply the first fallback that may help and ask for a new run; if none is left, raise an error with the reason."""
    error = failure.error
    remember(error, settings)
    if isinstance(error, CaptureError) and not isinstance(error, NotRecordable):
        raise error from None
    if not isinstance(error, CaptureError):
        _blame(failure)
    if isinstance(error, ChangesWhole) and settings.settled:
        kept = [item for item in settings.history if item.startswith("kept")]
        raise CaptureError(f"{failure.call.what}: {error}.\n" + "".join(f"  {item}\n" for item in kept)) from None
    for fallback in FALLBACKS:
        lines = len(settings.history)
        if isinstance(error, fallback.condition) and fallback.effect(failure, settings):
            if len(settings.history) == lines:  # those that keep something whole have added their own note
                settings.history.append(fallback.name)
            raise Retry from None
    where = next((path for path in reversed(failure.modules) if path), "")
    tried = list(dict.fromkeys(settings.history))[-_TRIED:]
    # Changes of Python state say themselves what to do.
    remedy = (
        ""
        if isinstance(error, Unsettled)
        else f"{_DRAW if isinstance(error, DrawsOutside) else ''}{_SPLIT}, or write it with tensor ops"
    )
    raise CaptureError(
        f"{failure.call.what} cannot be recorded.\n  where: module {where!r}\n  what: {failure.text}\n"
        + "".join(f"  tried: {item}\n" for item in tried)
        + (f"  do: {remedy}" if remedy else "")
    ) from error


def _blame(failure: Failure) -> None:
    """Raise the error of the user if the model itself fails on the example."""
    try:
        eager(failure.call, failure.leaves, failure.mode)
    except Exception as error:
        if failure.mode is None:
            raise
        raise CaptureError(
            f"{failure.call.what} cannot be recorded on the meta device (or on the host, for an accelerator on which it does "
            "not fit): without the contents of its tensors it fails "
            f"with {type(error).__name__}: {str(error)[:300]}\n  do: record it with real parameters"
        ) from error


def keep_whole(root: nn.Module, path: str, settings: Settings, why: str) -> bool:
    """Keep a module whole, unless it is kept already or holds too many of the parameters; return whether it is new."""
    if not path or path in settings.whole:
        return False
    total = sum(p.numel() for p in root.parameters()) or 1
    share = sum(p.numel() for p in root.get_submodule(path).parameters()) / total
    if share > _WHOLE_LIMIT:
        settings.history.append(
            f"module {path!r} holds {share:.0%} of the parameters: too large to keep whole ({why[:160]})"
        )
        return False
    settings.whole.add(path)
    settings.history.append(f"kept {path!r} whole ({why[:160]})")
    return True


def remember(error: Exception, settings: Settings) -> None:
    """If a run has found dictionaries that the model fills by size, record again with these dictionaries empty."""
    if isinstance(error, memos.Remembers) or settings.suspects:
        settings.tables += error.tables if isinstance(error, memos.Remembers) else ()
        settings.suspects = []
        raise Retry from None


def suspect(names: state.Names, settings: Settings) -> None:
    """If the model has dictionaries that look as if it had filled them by size, record once with all of them empty."""
    if settings.suspects is None:
        settings.suspects = memos.suspects(names.listed)
        if settings.suspects:
            raise Retry


def found_caches(run: Run, settings: Settings) -> None:
    """Record again if a run has called cached functions with sizes that were not known yet."""
    new: dict[int, list[CachedFunction]] = {}
    for place in (place for places in run.recorder.numbers.cached.values() for place in places):
        if id(place.function) not in settings.caches:
            new.setdefault(id(place.function), []).append(place)
    caches.forget([place for places in new.values() for place in places])
    settings.caches.update(new)
    if new:
        raise Retry
