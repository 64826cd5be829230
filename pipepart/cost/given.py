"""Graphs with costs in the two published formats of profiled graphs."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pipepart.cost.op_costs import OpCosts
from pipepart.errors import PlanError
from pipepart.files import load_json, read_text
from pipepart.values import MOST_WHOLE, Range

__all__ = ["GivenDevice", "GivenGraph", "GivenTensor", "read_graph"]

_NODE = re.compile(r"^(?P<name>\S+) -- (?P<text>.*) -- (?P<fields>forward_compute_time=.*)$")
_MILLISECOND = 1e-3


@dataclass(frozen=True)
class GivenTensor:
    """A tensor between ops: its bytes, or its cost if the file gives the cost itself."""

    ops: tuple[int, ...]
    size: float


@dataclass(frozen=True)
class GivenDevice:
    """A kind of device with a time for each op, infinite if it cannot run the op."""

    name: str
    count: int
    memory: float
    seconds: tuple[float, ...]
    communicates: bool


@dataclass(frozen=True)
class GivenGraph:
    """A whole graph from a file, with its ops in a topological order."""

    costs: OpCosts
    edges: tuple[tuple[int, int], ...]
    colocated: tuple[tuple[int, ...], ...] = ()
    tensors: tuple[GivenTensor, ...] | None = None
    """Traffic in seconds per chunk that shares the tensor. None: the file does not give it, so output bytes count."""
    devices: tuple[GivenDevice, ...] = ()


_Bytes = Annotated[float, Range(0, MOST_WHOLE)]


@dataclass(frozen=True)
class _OperatorNode:
    """A node of an operator graph in its file."""

    OPEN_ENDED: ClassVar[bool] = True
    id: int
    supportedOnFpga: bool | int
    cpuLatency: float
    fpgaLatency: float
    isBackwardNode: bool | int
    size: _Bytes
    colorClass: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class _OperatorEdge:
    """An edge of an operator graph in its file."""

    OPEN_ENDED: ClassVar[bool] = True
    sourceId: int
    destId: int
    cost: float


@dataclass(frozen=True)
class _OperatorFile:
    """The fields of an operator graph; other fields are ignored."""

    OPEN_ENDED: ClassVar[bool] = True
    maxSizePerFPGA: float
    maxFPGAs: int
    maxCPUs: int
    nodes: tuple[_OperatorNode, ...]
    edges: tuple[_OperatorEdge, ...]


def read_graph(path: str | Path) -> GivenGraph:
    """Read a published graph by the suffix of its name: ``.txt`` (layer profiles) or ``.json`` (operator graphs)."""
    readers = {".txt": _read_profile_txt, ".json": _read_operator_json}
    if Path(path).suffix not in readers:
        raise PlanError(f"costs: cannot tell the format of {path}; expected a name that ends in .txt or .json")
    try:
        return readers[Path(path).suffix](path)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(
            f"costs: {path} is not a published graph with costs: {type(error).__name__}: {error}"
        ) from error


def _read_profile_txt(path: str | Path) -> GivenGraph:
    """Read a layer profile: lines ``name -- text -- forward_compute_time=ms, ...``, then edges that start with a tab."""
    nodes: dict[str, dict[str, float]] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.startswith("\t"):
            source, found, target = line.strip().partition(" -- ")
            if not found:
                raise PlanError(f"costs: {path}:{number}: expected 'source -- target', got {line.strip()!r}")
            edges.append((source, target))
        elif line.strip():
            match = _NODE.match(line)
            if match is None:
                raise PlanError(f"costs: {path}:{number}: expected 'name -- text -- fields', got {line[:80]!r}")
            nodes[match["name"]] = _fields(match["fields"])
            if match["text"].startswith("Input"):  # the batch: the file gives the time of the data loader
                nodes[match["name"]]["forward_compute_time"] = 0.0
    unknown = [name for edge in edges for name in edge if name not in nodes]
    if unknown:
        raise PlanError(f"costs: {path}: an edge names {unknown[0]!r}, which is not a node of the file")
    order = _topological(list(nodes), edges, str(path))
    number_of = {name: i for i, name in enumerate(order)}
    rows = [nodes[name] for name in order]
    return GivenGraph(
        costs=OpCosts(
            names=tuple(order),
            forward=tuple(row["forward_compute_time"] * _MILLISECOND for row in rows),
            backward_input=tuple(row["backward_compute_time"] * _MILLISECOND for row in rows),
            backward_weight=(0.0,) * len(rows),
            parameter_bytes=tuple(int(row["parameter_size"]) for row in rows),
            saved_bytes=tuple(int(row["activation_size"]) for row in rows),
            output_bytes=tuple(int(row["activation_size"]) for row in rows),
            source=Path(path).name,
        ),
        edges=tuple(sorted((number_of[a], number_of[b]) for a, b in set(edges))),
    )


def _read_operator_json(path: str | Path) -> GivenGraph:
    """Read an operator graph with two kinds of devices, colour classes, and a cost per tensor.

    Times and costs have no unit in these files; they are kept as they are (as seconds). The order of the chunks is the
    order of the forward: a backward op is in the chunk of its forward op, and the edges between backward ops count as
    traffic only. If a backward op has no forward op beside it, its edges to other backward ops are kept, reversed.
    """
    data = load_json(path).read(_OperatorFile)
    nodes = {node.id: node for node in data.nodes}
    if len(nodes) < len(data.nodes):
        raise PlanError(f"costs: {path}: two nodes have the same id")
    costs = {edge.sourceId: edge.cost for edge in data.edges}
    links = [(edge.sourceId, edge.destId) for edge in data.edges]
    back = {n: bool(node.isBackwardNode) for n, node in nodes.items()}
    fast = {n: float(node.fpgaLatency) if node.supportedOnFpga else math.inf for n, node in nodes.items()}
    slow = {n: float(node.cpuLatency) for n, node in nodes.items()}
    unknown = [name for link in links for name in link if name not in nodes]
    if unknown:
        raise PlanError(f"costs: {path}: an edge names {unknown[0]}, which is not a node of the file")
    order, edges, groups = _forward_order(nodes, links, back, str(path))
    number_of = {name: i for i, name in enumerate(order)}
    users: dict[int, list[int]] = {}
    for a, b in links:
        users.setdefault(a, []).append(b)
    tensors = tuple(
        GivenTensor(tuple(sorted({number_of[name] for name in (a, *users[a])})), costs[a])
        for a in sorted(users, key=number_of.__getitem__)
        if costs[a] > 0
    )
    seconds = [fast[name] if math.isfinite(fast[name]) else slow[name] for name in order]
    return GivenGraph(
        costs=OpCosts(
            names=tuple(nodes[name].name or str(name) for name in order),
            forward=tuple(0.0 if back[name] else t for name, t in zip(order, seconds)),
            backward_input=tuple(t if back[name] else 0.0 for name, t in zip(order, seconds)),
            backward_weight=(0.0,) * len(order),
            parameter_bytes=tuple(int(nodes[name].size) for name in order),
            saved_bytes=(0,) * len(order),
            output_bytes=(0,) * len(order),
            source=Path(path).name,
        ),
        edges=tuple(sorted({(number_of[a], number_of[b]) for a, b in edges})),
        colocated=tuple(tuple(sorted(number_of[name] for name in group)) for group in groups),
        tensors=tensors,
        devices=(
            GivenDevice("accelerator", data.maxFPGAs, data.maxSizePerFPGA, tuple(fast[name] for name in order), True),
            GivenDevice("host", data.maxCPUs, math.inf, tuple(slow[name] for name in order), False),
        ),
    )


def _forward_order(
    nodes: Mapping[int, _OperatorNode], links: Sequence[tuple[int, int]], back: Mapping[int, bool], where: str
) -> tuple[list[int], list[tuple[int, int]], list[list[int]]]:
    """Return order, edges and groups of a graph whose backward ops follow the order of their forward ops."""
    groups: dict[Any, list[int]] = {}
    for name, node in nodes.items():
        if node.colorClass is not None:
            groups.setdefault(node.colorClass, []).append(name)
    paired = {name for group in groups.values() if not all(back[name] for name in group) for name in group}
    edges = []
    for a, b in links:
        if not back[a] and not back[b]:
            edges.append((a, b))
        elif back[a] and back[b] and not (a in paired and b in paired):
            edges.append((b, a))
    order = _topological(sorted(nodes), edges, where)
    return order, edges, [group for group in groups.values() if len(group) > 1]


def _topological(names: Sequence[Any], edges: Sequence[tuple[Any, Any]], where: str) -> list[Any]:
    """Return a topological order that is as near to the given order as possible."""
    rank = {name: i for i, name in enumerate(names)}
    after: dict[Any, set[Any]] = {name: set() for name in names}
    waiting = dict.fromkeys(names, 0)
    for a, b in set(edges):
        after[a].add(b)
        waiting[b] += 1
    ready = [rank[name] for name in names if not waiting[name]]
    heapq.heapify(ready)
    order = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for other in after[name]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, rank[other])
    if len(order) < len(names):
        raise PlanError(f"costs: the graph in {where} has a cycle; expected a DAG")
    return order


def _fields(text: str) -> dict[str, float]:
    """Parse ``a=1.0, b=[2.0; 3.0]`` into numbers; a list counts as its sum."""
    values = {}
    for part in text.split(", "):
        key, _, value = part.partition("=")
        values[key.strip()] = math.fsum(_number(piece) for piece in value.strip("[] ").split(";"))
    return values


def _number(value: Any) -> float:
    number = float(value)
    if not 0 <= number <= MOST_WHOLE:
        raise ValueError(f"{value!r}, expected a number from 0 to {MOST_WHOLE}")
    return number
