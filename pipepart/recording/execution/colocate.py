"""Groups of ops that must stay in one chunk, whatever the cuts."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
import torch.nn as nn
from networkx.utils import UnionFind

from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.op import op_of
from pipepart.recording.recorded import Recording
from pipepart.recording.recorded_run import intrinsics

__all__ = ["colocated"]


def colocated(recording: Recording) -> list[tuple[fx.Node, ...]]:
    """Return the groups of ops that must share a chunk, in program order.

    - Ops that make or unpack a tuple or an object: only tensors and numbers cross cuts.
    - Ops that use the same memory, up to its last change in place: a chunk sends its values after it has finished.
    - Ops that use a state which the model changes (buffers, metrics): the state is in one process.
    """
    nodes = [node for node in recording.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    position = {node: i for i, node in enumerate(nodes)}
    groups = UnionFind()
    for node in nodes:
        meta = op_of(node)
        users = [user for user in node.users if user.op != "output"]
        if meta.shape is None and not meta.is_number and not meta.replicable:
            groups.union(node, *users)
        sources = [source for source in node.all_input_nodes if source in position]
        if node.target == "register_hook" and node.args[0] in position:
            groups.union(node.args[0], node)
        if node.target is intrinsics.set_attribute:
            groups.union(node, *sources)
        if node.target is intrinsics.changed and not meta.replicable:
            groups.union(*sources)
            groups.union(node.args[1], node)
        if node.target is intrinsics.check:
            source = node.args[0]
            if isinstance(source, fx.Node) and source.op != "placeholder" and not op_of(source).replicable:
                groups.union(source, node)
    _join_memory(recording, position, groups)
    _join_state(recording, nodes, groups)
    found = (
        sorted((node for node in group if node in position), key=position.__getitem__) for group in groups.to_sets()
    )
    return sorted((tuple(group) for group in found if len(group) > 1), key=lambda group: position[group[0]])


def _join_memory(recording: Recording, position: dict[fx.Node, int], groups: UnionFind) -> None:
    touching: dict[Any, list[fx.Node]] = {}
    last: dict[Any, int] = {}
    persistent: set[Any] = set()
    for node in recording.graph.nodes:
        op = op_of(node)
        if node.op == "get_attr":
            persistent |= op.writes
        if node not in position:
            continue
        for storage in op.reads | op.writes:
            touching.setdefault(storage, []).append(node)
        for storage in op.mutates:
            last[storage] = position[node]
    for storage, end in last.items():
        members = [node for node in touching[storage] if storage in persistent or position[node] <= end]
        if not all(op_of(node).replicable for node in members):
            groups.union(*members)


def _join_state(recording: Recording, nodes: list[fx.Node], groups: UnionFind) -> None:
    owners: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "call_module" and op_of(node).stateful:
            owners.setdefault(str(node.target), []).append(node)
        elif node.target is intrinsics.method_of:
            owners.setdefault(_target(node), []).append(node)
        elif node.target is intrinsics.set_attribute:
            owner, name = _target(node), node.args[1]
            path = f"{owner}.{name}" if owner else str(name)
            readers = [user for source in node.graph.nodes if source.target == path for user in source.users]
            groups.union(node, *(user for user in readers if user.op != "output"))
    for path, calls in owners.items():
        module = resolve(recording.root, path)
        aliases = {name for name, other in recording.root.named_modules(remove_duplicate=False) if other is module}
        members = list(calls)
        for node in nodes:
            if node.op == "call_module" and str(node.target) in aliases:
                members.append(node)
            for source in node.all_input_nodes:
                if source.op == "get_attr" and _below(str(source.target), aliases, module):
                    members.append(node)
        groups.union(*members)


def _target(node: fx.Node) -> str:
    """Return the path of the module that an intrinsic is applied to."""
    module: Any = node.args[0]
    return str(module.target)


def _below(path: str, prefixes: set[str], module: nn.Module) -> bool:
    owner, _, name = path.rpartition(".")
    return (owner in prefixes and name in module._buffers) or path in prefixes
