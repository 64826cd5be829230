"""Dictionaries that a model fills by size: ``if n not in self.masks: self.masks[n] = ...``.

What comes from such a memory is not computed while the model is recorded, so sizes would be baked in. Therefore it is
empty when a recorded run begins, and a recorded call computes its part at every step. That is the same, since what is
kept is a function of sizes; what is not is refused.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn

from pipepart.recording.model_state.side_effects import Effects
from pipepart.recording.model_state.state import Attributes
from pipepart.recording.trace.failures import NotRecordable
from pipepart.recording.trace.recorder import Recorder
from pipepart.recording.trace.symbols import is_tracked
from pipepart.recording.trace.tensors import has_tracked, tensors_in

__all__ = ["Remembers", "emptied", "filled", "suspects"]

_DICTS = (dict, OrderedDict, defaultdict)


class Remembers(NotRecordable):
    """The model fills dictionaries by size; they have to be empty when the model is recorded."""

    tables: tuple[Any, ...] = ()


@contextmanager
def emptied(tables: Sequence[Any]) -> Iterator[None]:
    """These dictionaries are empty inside, and as before afterwards."""
    saved = [(table, table.copy()) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, copy in saved:
            table.clear()
            table.update(copy)


def suspects(modules: Sequence[tuple[str, nn.Module]]) -> list[Any]:
    """Dictionaries with numbers among their keys: a model may have filled them by size before it was recorded.

    Whether it has shows in a run with them empty: it fills them again.
    """
    candidates = _dictionaries(Attributes(modules), Effects(modules, lambda module, path: False))
    return [table for _, table, _ in candidates if table and all(_has_number(key) for key in table)]


def _has_number(key: Any) -> bool:
    return type(key) is int or (isinstance(key, tuple) and any(_has_number(item) for item in key))


def _dictionaries(attributes: Attributes, around: Effects) -> list[tuple[str, Any, Any]]:
    """Module path, dictionary, and what it held before."""
    inside: list[tuple[str, Any, Any]] = [
        (path, vars(module).get(name), copy)
        for path, module, _, containers in attributes.before
        for name, copy in containers.items()
    ]
    outside = [(place.module, place.value, place.copy) for place in around.places]
    return [entry for entry in [*inside, *outside] if type(entry[1]) in _DICTS]


def filled(
    recorder: Recorder, attributes: Attributes, around: Effects, tables: Sequence[Any], suspected: Sequence[Any]
) -> None:
    """Raise `Remembers` for dictionaries that the run has filled by size, unless they are among `tables`.

    What was put in must be a function of sizes: only then can it be computed anew at every step. Of dictionaries that
    are `suspected` those count that were filled.
    """
    known, found = {id(table) for table in tables}, []
    for path, table, copy in _dictionaries(attributes, around):
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
    """Whether a remembered value was computed with tensors or sizes; a plain number may be a counter."""
    return bool(tensors_in(value)) or has_tracked(value)


def _depends(recorder: Recorder, value: Any) -> str:
    """Why a remembered value is no function of sizes; nothing if it is."""
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
