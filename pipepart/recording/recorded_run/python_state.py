"""Changes of Python state by a recorded call: tensors kept as attributes become ops, other changes are refused."""

from __future__ import annotations

import torch.nn as nn

from pipepart.recording.model_state.places import is_plain_value
from pipepart.recording.model_state.reachable import OWN_NAMES
from pipepart.recording.model_state.side_effects import Effects
from pipepart.recording.model_state.state import Snapshot
from pipepart.recording.recorded_run import intrinsics, ops
from pipepart.recording.recorded_run.failures import NotRecordable, Unsettled
from pipepart.recording.recorded_run.recorder import Recorder
from pipepart.recording.recorded_run.symbols import is_tracked
from pipepart.recording.recorded_run.tensors import tensors_in

__all__ = ["keep_attributes", "refuse_effects", "refuse_hooks"]


def keep_attributes(recorder: Recorder, before: Snapshot) -> None:
    """Record tensors that the call keeps as attributes of modules; refuse other changes of attributes."""
    builder = recorder.builder
    whole = [name for name in builder.module_names.values() if name in recorder.whole]
    lost: dict[str, NotRecordable] = {}
    for path, module, name, old, value in before.changes():
        inside = any(path == name_ or path.startswith(f"{name_}.") for name_ in whole)
        if (
            inside
            or ops.is_torch_leaf(module)
            or ops.is_metric(module)
            or (not path and _is_kept_elsewhere(module, name))
        ):
            continue
        if is_tracked(value) or callable(value):
            continue
        if tensors_in(value) and all(id(tensor) in recorder.values for tensor in tensors_in(value)):
            with builder.inside(path, module):
                owner = builder.read_attribute(path)
                builder.make("call_function", intrinsics.set_attribute, (owner, name, builder.argument(value)), {})
            recorder.notes.append(f"attribute {name!r} of module {path!r}: each call stores a new tensor in it")
            continue
        if value == old and type(value) is type(old):
            continue
        kind = Unsettled if is_plain_value(old) and is_plain_value(value) else NotRecordable
        lost.setdefault(
            path,
            kind(
                f"attribute {name!r} of module {path!r} is changed by the call (before: {str(old)[:60]}, after: "
                f"{str(value)[:60]}); a recorded call keeps no Python state. Keep it in a buffer, log it or return it; "
                "if the model only sets itself up in its first call, run it once before"
            ),
        )
    if lost:
        first, *others = lost
        recorder.failed_in = [first]
        error = lost[first]
        error.also = tuple((path, str(lost[path])) for path in others if type(lost[path]) is type(error))
        raise error


def refuse_hooks(recorder: Recorder, before: Snapshot) -> None:
    """Refuse a call that leaves hooks behind: such a call initialises the model."""
    for path, name in before.hook_changes():
        recorder.failed_in = [path]
        raise Unsettled(
            f"the call adds or removes hooks of module {path!r} ({name}); a recorded call does not. Register hooks "
            "before the model is recorded, and remove hooks in the call that has added them"
        )


def _is_kept_elsewhere(module: nn.Module, name: str) -> bool:
    """Return whether an attribute belongs to torch or Lightning, or is set after each step by the code that watches it.

    Buffers are set by the graph.
    """
    return name in OWN_NAMES or (getattr(type(module), "_pipepart_sets", False) and name not in module._buffers)


def refuse_effects(recorder: Recorder, effects: Effects) -> None:
    """Refuse a call that changes Python state outside its modules, and note global hooks."""
    for path, text in effects.changes():
        recorder.failed_in = [path]
        raise Unsettled(
            f"{text} is changed by the call of module {path!r}; a recorded call keeps no Python state. Keep it in a "
            "buffer, log it or return it"
        )
    if ops.has_global_hooks():
        recorder.notes.append(
            "global module hooks run only for modules that are recorded as one op, not for modules that contain them"
        )
