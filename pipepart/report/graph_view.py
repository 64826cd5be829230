"""The graph of a page: names, places and sizes of ops, without tensors, modules or functions.

`save_graph` writes it to a file, so that a run folder can be viewed without the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pipepart.cost import OpCosts
from pipepart.errors import PlanError
from pipepart.files import load_json, write_whole

__all__ = ["GraphView", "load_graph", "save_graph"]

VERSION = 1
_TEXT = ("name", "kind", "target", "module", "module_class", "source", "shape", "dtype")


@dataclass(frozen=True)
class GraphView:
    """One column per property, with one entry per op in program order. Unknown columns are empty."""

    hash: str
    name: tuple[str, ...]
    kind: tuple[str, ...]
    target: tuple[str, ...]
    module: tuple[str, ...]
    """Module path of each op; empty for ops of the root."""
    module_class: tuple[str, ...]
    source: tuple[str, ...]
    shape: tuple[str, ...]
    dtype: tuple[str, ...]
    output_bytes: tuple[int, ...]
    flops: tuple[float, ...]
    parameters: tuple[tuple[str, ...], ...]
    """Names of the parameters that each op uses."""
    parameter_bytes: tuple[int, ...]
    """Bytes of all parameters of each op together."""
    edges: tuple[tuple[int, int], ...]
    forward: tuple[float, ...] = ()
    backward_input: tuple[float, ...] = ()
    backward_weight: tuple[float, ...] = ()
    saved_bytes: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.name)

    @property
    def tied(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Parameters that ops of different modules use, with these ops."""
        users: dict[str, list[int]] = {}
        for op, names in enumerate(self.parameters):
            for name in names:
                users.setdefault(name, []).append(op)
        shared = ((name, tuple(ops)) for name, ops in users.items() if len({self.module[op] for op in ops}) > 1)
        return tuple(sorted(shared))

    @staticmethod
    def of(graph: Any, costs: OpCosts | None = None) -> GraphView:
        """Return the view of an `OpGraph` (or a given view), with times and sizes of its ops if costs are given."""
        view = graph if isinstance(graph, GraphView) else _from_graph(graph)
        if costs is None:
            return view
        if costs.names != view.name:
            raise PlanError(
                f"the costs belong to another graph: they have {len(costs)} ops, the graph has {len(view)}, or names differ. "
                "Give the costs that the plan was made with."
            )
        return replace(
            view,
            forward=costs.forward,
            backward_input=costs.backward_input,
            backward_weight=costs.backward_weight,
            saved_bytes=costs.saved_bytes,
            output_bytes=costs.output_bytes,
        )

    @staticmethod
    def from_names(names: Sequence[str], graph_hash: str = "") -> GraphView:
        """Return the view of a graph of which only the names of ops are known."""
        columns: dict[str, Any] = {column: ("",) * len(names) for column in _TEXT}
        return GraphView(
            hash=graph_hash,
            **{**columns, "name": tuple(names)},
            output_bytes=(),
            flops=(),
            parameters=((),) * len(names),
            parameter_bytes=(),
            edges=(),
        )


def _word(value: Any) -> str:
    """Return a property as text: functions by their name, shapes as ``2 x 3``."""
    if value is None:
        return ""
    if isinstance(value, (tuple, list)):
        if all(isinstance(size, int) for size in value):
            return " x ".join(str(int(size)) for size in value) if value else "scalar"
        return ", ".join(f"({_word(item)})" if isinstance(item, (tuple, list)) else _word(item) for item in value)
    if isinstance(value, str):
        return value
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def _from_graph(graph: Any) -> GraphView:
    ops = graph.ops
    columns: dict[str, Any] = {field: tuple(_word(getattr(op, field, "")) for op in ops) for field in _TEXT}
    return GraphView(
        hash=str(graph.hash),
        **columns,
        output_bytes=tuple(int(getattr(op, "output_bytes", 0) or 0) for op in ops),
        flops=tuple(float(getattr(op, "flops", 0) or 0) for op in ops),
        parameters=tuple(tuple(getattr(op, "parameters", ())) for op in ops),
        parameter_bytes=tuple(int(getattr(op, "parameter_bytes", 0) or 0) for op in ops),
        edges=tuple((int(source), int(target)) for source, target in graph.edges),
    )


def save_graph(path: str | Path, graph: Any, costs: OpCosts | None = None) -> Path:
    """Write the view of an `OpGraph`, with its costs if they are given, as JSON."""
    view = GraphView.of(graph, costs)
    data = {"pipepart": "graph", "version": VERSION, **vars(view)}
    write_whole(path, json.dumps(data, separators=(",", ":")) + "\n")
    return Path(path)


def load_graph(path: str | Path) -> GraphView:
    """Read a file of `save_graph`."""
    if not os.path.exists(path):
        raise PlanError(f"there is no graph at {str(path)!r}. Write one with save_graph(path, graph).")
    file = load_json(path)
    data = dict(file.entries())
    if (data.pop("pipepart", None), data.pop("version", None)) != ("graph", VERSION):
        raise PlanError(f"{str(path)!r} is not a graph file of version {VERSION}. Save the graph again.")
    view = replace(file, value=data).read(GraphView)
    for column in (field.name for field in fields(view) if field.name not in ("hash", "edges")):
        entries = getattr(view, column)
        if len(entries) != len(view) and (entries or column in (*_TEXT, "parameters")):
            raise file.at(column).refused(f"{len(view)} entries, one for each op")
    for index, edge in enumerate(view.edges):
        if max(edge) >= len(view):
            raise file.at("edges").at(index).refused(f"numbers of ops below {len(view)}")
    return view
