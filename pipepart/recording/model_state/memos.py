"""Dictionaries that a model fills by size: ``if n not in self.masks: self.masks[n] = ...``.

A value from such a dictionary is not computed while the model is recorded, so the recording would fix its sizes.
Therefore the dictionary is empty when a recorded run begins, and a recorded call computes the value at every step. The
result is the same, because the value is a function of sizes; a dictionary with other values is refused.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.recording.model_state.places import refill
from pipepart.recording.model_state.side_effects import Effects
from pipepart.recording.model_state.state import Snapshot
from pipepart.recording.recorded_run.failures import NotRecordable
from pipepart.recording.recorded_run.recorder import Recorder
from pipepart.recording.recorded_run.symbols import is_tracked
from pipepart.recording.recorded_run.tensors import has_tracked, tensors_in

__all__ = ["Remembers", "emptied", "filled", "suspects"]

_DICTS = (dict, OrderedDict, defaultdict)


class Remembers(NotRecordable):
    """The model fills dictionaries by size, which must be empty when the model is recorded."""

    tables: tuple[Any, ...] = ()


@contextmanager
def emptied(tables: Sequence[Any]) -> Iterator[None]:
    """Empty these dictionaries, and restore their items afterwards."""
    saved = [(table, table.copy()) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, copy in saved:
            refill(table, copy)


def suspects(modules: Sequence[tuple[str, nn.Module]]) -> list[Any]:
    """Return the dictionaries with numbers in all keys: the model may have filled them by size before it was recorded.

    If it did, a run with empty dictionaries fills them again.
    """
    candidates = _dictionaries(Snapshot(modules), Effects(modules, lambda module, path: False))
    return [table for _, table, _ in candidates if table and all(_has_number(key) for key in table)]


def _has_number(key: Any) -> bool:
    return type(key) is int or (isinstance(key, tuple) and any(_has_number(item) for item in key))


def _dictionaries(before: Snapshot, around: Effects) -> list[tuple[str, Any, Any]]:
    """Return all dictionaries: module path, dictionary, and a copy of the dictionary before the run."""
    inside: list[tuple[str, Any, Any]] = [
        (known.path, vars(known.module).get(name), copy)
        for known in before.modules
        for name, copy in known.containers.items()
    ]
    outside = [(variable.module, variable.value, variable.copy) for variable in around.variables]
    return [entry for entry in [*inside, *outside] if type(entry[1]) in _DICTS]


def filled(
    recorder: Recorder, before: Snapshot, around: Effects, tables: Sequence[Any], suspected: Sequence[Any]
) -> None:
    """Raise `Remembers` for dictionaries that the run has filled by size, unless they are among `tables`.

    The new values must be functions of sizes, so that they can be computed again at every step. A dictionary that
    is `suspected` counts only if the run has filled it.
    """
    known, found = {id(table) for table in tables}, []
    for path, table, copy in _dictionaries(before, around):
        new = {key: value for key, value in table.items() if key not in copy} if len(table) != len(copy) else {}
        if not new or not all(has_tracked(key) and _is_result(value) for key, value in new.items()):
            continue
        for value in new.values():
            reason = _depends(recorder, value)
            if reason:
                recorder.failed_in = [path]
                raise NotRecordable(
                    f"a dictionary with sizes as keys, of module {path!r}, keeps {reason}: a recorded call keeps no "
                    "Python state. Keep it in a buffer, or compute it in every call"
                )
        if id(table) not in known:
            found.append(table)
    if found or suspected:
        error = Remembers("the model keeps tensors by size in a dictionary")
        error.tables = tuple(found)
        raise error


def _is_result(value: Any) -> bool:
    """Return whether a remembered value was computed with tensors or sizes; a plain number may be a counter."""
    return bool(tensors_in(value)) or has_tracked(value)


def _depends(recorder: Recorder, value: Any) -> str:
    """Return the reason why a remembered value is not a function of sizes; empty if it is one."""
    if is_tracked(value) and value.from_data:
        return "a number that was read from a tensor"
    todo = [recorder.values[id(tensor)] for tensor in tensors_in(value) if id(tensor) in recorder.values]
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        fact = recorder.facts[node]
        if fact.random:
            return "random numbers"
        if fact.requires_grad:
            return "a tensor that requires a gradient"
        if node.op == "placeholder" or fact.from_data:
            return "a tensor that depends on the contents of the batch"
        if node.op == "call_module":
            return f"a result of module {node.target!r}"
        if node.op == "get_attr" and isinstance(fact.tensor, torch.Tensor) and node in recorder.mutations.values():
            return f"{node.target!r}, which changes"
        if fact.number is None or node.op == "call_function":  # a size is known, whatever the tensor
            todo += node.all_input_nodes
    return ""
