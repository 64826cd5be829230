"""Updates of parameters inside a step that depend on parameters alone, such as those of a momentum encoder.

They belong to the batch and not to a micro-batch, and need parameters of several stages. So they are taken out of the
recorded step and run once for each batch: before the step if the step reads the new values, after it if it reads the old ones.

```
step      target <- lerp(target, online);  z = target(x);  loss = f(online(x), z)
taken     target <- lerp(target, online)                                            once, before the batch
left                                       z = target(x);  loss = f(online(x), z)   for each micro-batch
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from pipepart.recording.execution.emit import executable
from pipepart.recording.execution.ops_run import RecordedGraph, used_tensors
from pipepart.recording.op import has_op, op_of, set_op
from pipepart.recording.recorded import Recording
from pipepart.recording.recorded_run import intrinsics

__all__ = ["ParameterUpdate", "UpdateRefused", "changed_parameters", "take_update"]


class UpdateRefused(Exception):
    """A step changes a parameter in a way that cannot be taken out of it, for the reason in the text."""


@dataclass(frozen=True, eq=False)
class ParameterUpdate:
    """The ops that change parameters, apart from their step."""

    module: RecordedGraph
    numbers: tuple[str, ...]
    """The names of its inputs, which are numbers."""
    before: bool
    """Whether it runs before the step; else after it."""
    changed: tuple[str, ...]
    used: tuple[str, ...]
    """The names of all parameters and buffers that it reads or changes."""


def take_update(recording: Recording) -> tuple[Recording, ParameterUpdate | None]:
    """Return a recording without the ops that change parameters, and these; None if there are none."""
    nodes = [node for node in recording.graph.nodes if has_op(node)]
    memory = _memory(recording)
    writes = {node: op_of(node).mutates & memory.keys() for node in nodes}
    updates = [node for node in nodes if writes[node]]
    if not updates:
        return recording, None
    fixed = _fixed(recording)
    for node in updates:
        name = memory[next(iter(writes[node]))]
        if node not in fixed:
            raise UpdateRefused(f"the step changes parameter {name!r} by values of the batch, at {op_of(node).source}")
        if not _can_be_left_out(node):
            raise UpdateRefused(f"the step changes parameter {name!r} by {node.target}, at {op_of(node).source}")
    taken = _closure(updates)
    reads = {node: _reads(recording, node, memory) for node in nodes}
    before = _is_before(reads, taken, updates, memory, writes)
    _check_apart(nodes, taken)
    ops = [node for node in nodes if node in taken and node.op not in ("get_attr", "placeholder")]
    inputs = [node for node in nodes if node in taken and node.op == "placeholder"]
    update = ParameterUpdate(
        module=executable(recording, ops, inputs, []),
        numbers=tuple(node.name for node in inputs),
        before=before,
        changed=tuple(dict.fromkeys(memory[storage] for node in updates for storage in writes[node])),
        used=tuple(used_tensors(recording, ops)),
    )
    return dataclasses.replace(recording, graph=_without(recording, set(updates))), update


def changed_parameters(recording: Recording) -> list[str]:
    """Return the names of the parameters that the recorded ops change."""
    memory = _memory(recording)
    changed = set().union(*(op_of(node).mutates for node in recording.graph.nodes if has_op(node)))
    return list(dict.fromkeys(name for storage, name in memory.items() if storage in changed))


def _memory(recording: Recording) -> dict[Any, str]:
    """Return the names of the parameters that the recorded ops use, by their memory."""
    names = {name for name, _ in recording.root.named_parameters(remove_duplicate=False)}
    found: dict[Any, str] = {}
    for node in recording.graph.nodes:
        if node.op == "get_attr" and str(node.target) in names and has_op(node):
            found.update(dict.fromkeys(op_of(node).writes, str(node.target)))
    return found


def _fixed(recording: Recording) -> set[fx.Node]:
    """Return the ops that depend on parameters, buffers, constants and numbers of the step alone."""
    kinds = {item.name: item.kind for item in recording.inputs}
    found: set[fx.Node] = set()
    for node in recording.graph.nodes:
        if node.op == "placeholder":
            known = kinds.get(node.name) == "number"
        else:
            known = node.op in ("get_attr", "call_function", "call_method") and not op_of(node).random
            known = known and all(source in found for source in node.all_input_nodes)
        if known:
            found.add(node)
    return found


def _closure(updates: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(updates)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _can_be_left_out(node: fx.Node) -> bool:
    """Return whether the result of an op that changes a tensor is that tensor, or is not used."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") or name.startswith("i") or node.target is intrinsics.set_data or name == "setitem"
    if node.args and isinstance(node.args[0], fx.Node) and in_place:
        return True
    return all(user.target is intrinsics.changed and user.args[1] is node for user in node.users)


def _reads(recording: Recording, node: fx.Node, memory: Mapping[Any, str]) -> frozenset[Any]:
    """Return the memory that an op reads; a module that is one op reads its parameters."""
    if node.op != "call_module":
        return op_of(node).reads
    own = set(used_tensors(recording, [node]))
    return op_of(node).reads | {storage for storage, name in memory.items() if name in own}


def _is_before(
    reads: Mapping[fx.Node, frozenset[Any]],
    taken: set[fx.Node],
    updates: list[fx.Node],
    memory: Mapping[Any, str],
    writes: Mapping[fx.Node, Any],
) -> bool:
    """Return whether all other ops read the changed parameters after the updates; False if all read them before."""
    position = {node: i for i, node in enumerate(reads)}
    sides: dict[bool, tuple[str, str]] = {}
    for storage in dict.fromkeys(storage for node in updates for storage in writes[node]):
        own = [position[node] for node in updates if storage in writes[node]]
        for node in reads:
            if node in taken or node.op in ("get_attr", "placeholder") or storage not in reads[node]:
                continue
            if min(own) < position[node] < max(own):
                where = op_of(node).source
                raise UpdateRefused(f"the step reads parameter {memory[storage]!r}, at {where}, between changes of it")
            sides.setdefault(position[node] > max(own), (memory[storage], op_of(node).source))
    if len(sides) > 1:
        raise UpdateRefused(
            f"the step changes parameters and reads {sides[False][0]!r} before that, at {sides[False][1]}, and "
            f"{sides[True][0]!r} after that, at {sides[True][1]}"
        )
    return False not in sides


def _check_apart(nodes: list[fx.Node], taken: set[fx.Node]) -> None:
    """Refuse an update that reads memory which the rest of the step changes."""
    read = set().union(*(op_of(node).reads for node in taken))
    for node in nodes:
        if node not in taken and op_of(node).mutates & read:
            raise UpdateRefused(
                f"the step changes, at {op_of(node).source}, a buffer that an update of parameters reads"
            )


def _without(recording: Recording, updates: set[fx.Node]) -> fx.Graph:
    """Return the graph without these ops: their results are the parameters themselves."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in recording.graph.nodes:
        stale = node.target is intrinsics.changed and node.args[1] in updates
        if node in updates or stale:
            source = node.args[0]
            if isinstance(source, fx.Node):
                new[node] = new[source]
            continue
        new[node] = graph.node_copy(node, lambda source: new[source])
        new[node].name = node.name
    for node, made in new.items():
        if made.name == node.name:
            through = frozenset(new[other] for other in op_of(node).differentiates if other in new)
            set_op(made, dataclasses.replace(op_of(node), differentiates=through))
    return graph
