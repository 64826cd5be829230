"""Working notes of the recorder on each node, and the description of ops that is made of them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.fx as fx

from pipepart.recording.fingerprint import target_name
from pipepart.recording.op import OpMeta, set_op
from pipepart.recording.recorded_run import intrinsics

__all__ = ["Fact", "annotate"]


@dataclass
class Fact:
    """Working notes of the recorder on one node. Fields with the name of a field of `OpMeta` become that field."""

    module: str = ""
    module_class: str = ""
    source: str = ""
    tensor: torch.Tensor | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    output_bytes: int = 0
    requires_grad: bool = False
    number: Any = None
    """The value, if it is a Python number."""
    varies: bool = False
    """Whether the value may differ from call to call."""
    random: bool = False
    chance: bool = False
    """Whether the value is made of random numbers alone, without inputs and parameters."""
    dynamic_shape: bool = False
    stateful: bool = False
    from_data: bool = False
    """Whether the value, or the decision, was read from the contents of a tensor."""
    grad_mode: bool = True
    autocast: tuple[Any, ...] = ()
    switches: tuple[Any, ...] = ()
    reads: set[Any] = field(default_factory=set)
    writes: set[Any] = field(default_factory=set)
    mutates: set[Any] = field(default_factory=set)
    differentiates: set[fx.Node] = field(default_factory=set)
    rows: tuple[tuple[int, ...], ...] = ()
    checkpoint: tuple[int, ...] = ()
    moment: int = 0


_HEAVY = ("matmul", "bmm", "mm", "linear", "conv", "einsum", "attention", "baddbmm", "addmm", "__matmul__", "cdist")
_HEAVY_WORK = 1 << 24
"""Products of more multiply-adds than this are sent and not computed again in each chunk."""


def annotate(graph: fx.Graph, facts: dict[fx.Node, Fact]) -> None:
    """Describe all nodes of a recorded graph by an `OpMeta` each, made of the notes on them."""
    nodes = list(graph.nodes)
    known, replicable = set(nodes), _replicable(nodes, facts)
    for node in nodes:
        fact = facts[node]
        same = {name: getattr(fact, name) for name in _SAME}
        same = {name: frozenset(value) if isinstance(value, set) else value for name, value in same.items()}
        same["differentiates"] &= known
        is_number = fact.number is not None
        computes = not is_number and node.target not in (intrinsics.check, intrinsics.changed)
        set_op(node, OpMeta(**same, is_number=is_number, computes=computes, replicable=node in replicable))


_SAME = tuple({item.name for item in fields(OpMeta)} & {item.name for item in fields(Fact)})


def _replicable(nodes: list[fx.Node], facts: dict[fx.Node, Fact]) -> set[fx.Node]:
    """Return the ops that every chunk may compute for itself.

    They are cheap and made of inputs, without parameters, random numbers and gradients. Changing memory in place is
    allowed if all ops that touch this memory are of this kind.
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
            if _is_good(node, facts, good) and node not in banned:
                good.add(node)
        spoiled: set[fx.Node] = set()
        for storage, end in last.items():
            members = [node for node in touching[storage] if positions[node] <= end]
            if any(node not in good or node.op in ("placeholder", "get_attr") for node in members):
                spoiled.update(node for node in members if node.op not in ("placeholder", "get_attr"))
        if spoiled <= banned:
            return {node for node in good if node.op not in ("placeholder", "get_attr")}
        banned |= spoiled


def _is_good(node: fx.Node, facts: dict[fx.Node, Fact], good: set[fx.Node]) -> bool:
    fact = facts[node]
    if node.op in ("placeholder", "get_attr"):
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
    return (facts[node].output_bytes or 1) * inner
