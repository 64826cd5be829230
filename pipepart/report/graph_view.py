"""The recorded graph as the page shows it: names, places and sizes of ops, without tensors, modules or functions.

It can be kept in a file, so that a run folder is viewed later without the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipepart.cost import OpCosts
from pipepart.errors import PlanError

__all__ = ["GraphView", "load_graph", "save_graph"]

VERSION = 1
_TEXT = ("name", "kind", "target", "module", "module_class", "source", "shape", "dtype")


@dataclass(frozen=True)
class GraphView:
    """One column per property, one entry per op, in program order. Columns that nobody knew are empty."""

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
        """Parameters that ops in different modules use, with these ops."""
        users: dict[str, list[int]] = {}
        for op, names in enumerate(self.parameters):
            for name in names:
                users.setdefault(name, []).append(op)
        shared = ((name, tuple(ops)) for name, ops in users.items() if len({self.module[op] for op in ops}) > 1)
        return tuple(sorted(shared))

    @staticmethod
    def of(graph: Any, costs: OpCosts | None = None) -> GraphView:
        """The view of an `OpGraph` (or of a view), with the times and sizes of its ops if their costs are given."""
        view = graph if isinstance(graph, GraphView) else _from_graph(graph)
        return view if costs is None else view.with_costs(costs)

    def with_costs(self, costs: OpCosts) -> GraphView:
        if costs.names != self.name:
            raise PlanError(
                f"the costs belong to another graph: {len(costs)} ops against {len(self)}, or other names. "
                "Give the costs that the plan was made with."
            )
        data = {field: getattr(self, field) for field in self.__dataclass_fields__}
        data.update(
            forward=costs.forward,
            backward_input=costs.backward_input,
            backward_weight=costs.backward_weight,
            saved_bytes=costs.saved_bytes,
            output_bytes=costs.output_bytes,
        )
        return GraphView(**data)

    @staticmethod
    def from_names(names: Sequence[str], graph_hash: str = "") -> GraphView:
        """What a plan alone tells about its graph: the names of its ops."""
        blank = ("",) * len(names)
        return GraphView(
            hash=graph_hash,
            name=tuple(names),
            kind=blank,
            target=blank,
            module=blank,
            module_class=blank,
            source=blank,
            shape=blank,
            dtype=blank,
            output_bytes=(),
            flops=(),
            parameters=((),) * len(names),
            parameter_bytes=(),
            edges=(),
        )


def _word(value: Any) -> str:
    """A property as text: targets that are functions by their name, shapes as ``2 x 3``."""
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
    """Write what the page needs of an `OpGraph` (and of its costs) as JSON."""
    view = GraphView.of(graph, costs)
    data = {"pipepart": "graph", "version": VERSION}
    data.update({field: getattr(view, field) for field in view.__dataclass_fields__})
    Path(path).write_text(json.dumps(data, separators=(",", ":")) + "\n")
    return Path(path)


def load_graph(path: str | Path) -> GraphView:
    """Read a file of `save_graph`."""
    try:
        data = json.loads(Path(path).read_text())
        if data.pop("pipepart") != "graph" or data.pop("version") != VERSION:
            raise KeyError("version")
        data["parameters"] = [tuple(names) for names in data["parameters"]]
        data["edges"] = [tuple(edge) for edge in data["edges"]]
        columns: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return GraphView(**columns)
    except FileNotFoundError as error:
        raise PlanError(f"there is no graph at {str(path)!r}. Write one with save_graph(path, graph).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{str(path)!r} is not a graph file of version {VERSION} ({error!r}). Save the graph again."
        ) from error
