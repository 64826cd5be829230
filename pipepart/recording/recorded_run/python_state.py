"""Changes of Python state by a recorded call: tensors kept as attributes become ops, other changes are refused."""

from __future__ import annotations

from collections.abc import Collection

import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording.model_state.places import is_plain_value
from pipepart.recording.model_state.reachable import OWN_NAMES
from pipepart.recording.model_state.side_effects import Effects
from pipepart.recording.model_state.state import Snapshot
from pipepart.recording.recorded_run import intrinsics, ops
from pipepart.recording.recorded_run.failures import ChangesWhole, Keeps, NotRecordable, Unsettled
from pipepart.recording.recorded_run.recorder import Recorder
from pipepart.recording.recorded_run.symbols import is_of_step, is_tracked
from pipepart.recording.recorded_run.tensors import tensors_in

__all__ = ["is_watched", "keep_attributes", "refuse_effects", "refuse_hooks"]


def keep_attributes(recorder: Recorder, before: Snapshot, repeated: Collection[tuple[str, str]] = ()) -> None:
    """Record tensors that the call keeps as attributes of modules; refuse other changes of attributes.

    The caller sets the attributes `repeated` after each call.
    """
    builder = recorder.builder
    whole = [name for name in builder.module_names.values() if name in recorder.whole]
    lost: dict[str, NotRecordable] = {}
    changed: list[tuple[str, str]] = []
    changes = list(before.changes())
    caching = {
        path for path, _, _, _, value in changes if tensors_in(value)
    }  # sizes there belong to a cache of tensors
    for path, module, name, old, value in changes:
        inside = any(path == name_ or path.startswith(f"{name_}.") for name_ in whole)
        if not path and is_watched(module) and name in module._buffers and old is None and value is not None:
            raise CaptureError(
                f"the step registers the buffer {name!r}. The stages of a pipeline are made before it: register it in "
                "__init__, with its final shape, or in a hook (on_fit_start)."
            )
        if inside and is_watched(builder.root):
            _refuse_inside(recorder, path, module, name, old, value)
        if (
            inside
            or ops.is_torch_leaf(module)
            or ops.is_metric(module)
            or (path, name) in repeated
            or (not path and _is_kept_elsewhere(module, name))
        ):
            continue
        if path and is_watched(builder.root) and (is_of_step(value) or (is_tracked(value) and path not in caching)):
            recorder.failed_in = [path]
            raise Keeps.of(path, name)
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
        if kind is Unsettled:
            changed.append((path, name))
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
        problem = lost[first]
        if isinstance(problem, Unsettled):
            problem.attributes = tuple(changed)
        problem.also = tuple((path, str(lost[path])) for path in others if type(lost[path]) is type(problem))
        raise problem


def is_watched(root: nn.Module) -> bool:
    """Return whether the code that records the root repeats changes of attributes after each call, once per batch."""
    return bool(getattr(type(root), "_pipepart_sets", False))


def _refuse_inside(recorder: Recorder, path: str, module: nn.Module, name: str, old: object, value: object) -> None:
    """Refuse a change of a plain attribute by a module that is kept whole: it runs once for each micro-batch."""
    plain = is_plain_value(old) and is_plain_value(value) and name not in OWN_NAMES
    if not plain or ops.is_torch_leaf(module) or ops.is_metric(module) or (value == old and type(value) is type(old)):
        return
    recorder.failed_in = [path]
    raise ChangesWhole(
        f"module {path!r} ({type(module).__name__}) is kept whole and changes its attribute {name!r} in each call (before: "
        f"{str(old)[:60]}, after: {str(value)[:60]}). It is called once for each micro-batch, on its own stage, so it "
        "would have other values than on one device. Change it in the step itself, or in a hook (on_train_batch_start)"
    )


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
    return name in OWN_NAMES or (is_watched(module) and name not in module._buffers)


def refuse_effects(recorder: Recorder, effects: Effects) -> None:
    """Refuse a call that changes Python state outside its modules, and note global hooks."""
    for path, text in effects.changes():
        recorder.failed_in = [path]
        raise Unsettled(
            f"{text} is changed by the call of module {path!r}; a recorded call keeps no Python state. Keep it in an attribute "
            "of a LightningModule itself (self.count += 1), which is repeated in each step, or in a buffer; change it in a "
            "hook; log it or return it"
        )
    if ops.has_global_hooks():
        recorder.notes.append(
            "global module hooks run only for modules that are recorded as one op, not for modules that contain them"
        )
