"""From what was seen while recording to what later steps need to know of each node."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from pipepart.recording.fingerprint import target_name
from pipepart.recording.recording import OpMeta, Recording
from pipepart.recording.trace import intrinsics
from pipepart.recording.trace.facts import Fact
from pipepart.recording.trace.recorder import Recorder

__all__ = ["annotate"]

_HEAVY = ("matmul", "bmm", "mm", "linear", "conv", "einsum", "attention", "baddbmm", "addmm", "__matmul__", "cdist")
_HEAVY_WORK = 1 << 24
"""A product of more multiply-adds than this is sent, not computed again on each chunk."""


def annotate(recording: Recording, recorder: Recorder) -> None:
    """Fill ``node.meta`` of all nodes of a recording from the facts of its recorder."""
    nodes = list(recording.graph.nodes)
    facts = recorder.facts
    replicable = _replicable(nodes, facts, recording)
    positions = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        fact = facts[node]
        node.meta["grad_mode"] = fact.grad_mode
        node.meta["autocast"] = fact.autocast
        node.meta["switches"] = fact.switches
        node.meta["checkpoint"] = fact.checkpoint
        node.meta["computes"] = fact.number is None and node.target not in (intrinsics.check, intrinsics.changed)
        node.meta["storages"] = (frozenset(fact.reads), frozenset(fact.writes), frozenset(fact.mutates))
        node.meta["differentiates"] = frozenset(other for other in fact.differentiates if other in positions)
        node.meta["stateful"] = fact.stateful
        node.meta["value"] = fact.number
        node.meta["rows"] = fact.rows
        if node.op in ("get_attr", "output"):
            node.meta["requires_grad"] = fact.requires_grad
            continue
        node.meta["op"] = OpMeta(
            module=fact.module,
            module_class=fact.module_class,
            source=fact.source,
            shape=fact.shape,
            dtype=fact.dtype,
            nbytes=fact.nbytes,
            requires_grad=fact.requires_grad,
            is_number=fact.number is not None,
            inplace=bool(fact.mutates),
            random=fact.random,
            dynamic_shape=fact.dynamic,
            replicable=node in replicable,
        )


def _replicable(nodes: list[fx.Node], facts: dict[fx.Node, Fact], recording: Recording) -> set[fx.Node]:
    """Ops that every chunk may compute for itself: cheap, without parameters, random numbers or gradients, from inputs.

    Changing memory in place is allowed if all that touches that memory is of this kind.
    """
    good: set[fx.Node] = set()
    banned: set[fx.Node] = set()
    touching: dict[Any, list[fx.Node]] = {}
    last: dict[Any, int] = {}
    for i, node in enumerate(nodes):
        for storage in facts[node].reads | facts[node].writes:
            touching.setdefault(storage, []).append(node)
        for storage in facts[node].mutates:
            last[storage] = i
    positions = {node: i for i, node in enumerate(nodes)}
    while True:
        good.clear()
        for node in nodes:
            if _is_good(node, facts, good, recording) and node not in banned:
                good.add(node)
        spoiled: set[fx.Node] = set()
        for storage, end in last.items():
            members = [node for node in touching[storage] if positions[node] <= end]
            if any(node not in good or node.op in ("placeholder", "get_attr") for node in members):
                spoiled.update(node for node in members if node.op not in ("placeholder", "get_attr"))
        if spoiled <= banned:
            return {node for node in good if node.op not in ("placeholder", "get_attr")}
        banned |= spoiled


def _is_good(node: fx.Node, facts: dict[fx.Node, Fact], good: set[fx.Node], recording: Recording) -> bool:
    fact = facts[node]
    if node.op == "placeholder":
        return not fact.requires_grad
    if node.op == "get_attr":
        return not fact.requires_grad
    if node.op not in ("call_function", "call_method") or fact.random or fact.requires_grad or fact.stateful:
        return False
    if node.target in (intrinsics.check, intrinsics.method_of, intrinsics.set_attribute) or hasattr(
        node.target, "stable_name"
    ):
        return False
    if any(heavy in target_name(node.target) for heavy in _HEAVY) and _work(node, facts) > _HEAVY_WORK:
        return False
    return all(source in good for source in node.all_input_nodes)


def _work(node: fx.Node, facts: dict[fx.Node, Fact]) -> int:
    shapes = [shape for source in node.all_input_nodes if (shape := facts[source].shape)]
    inner = max((shape[-1] for shape in shapes), default=1)
    return (facts[node].nbytes or 1) * inner
