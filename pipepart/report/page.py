"""The page: plans, timelines and the graph as one JSON document, in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from pipepart.errors import PlanError
from pipepart.planning.plan import Plan
from pipepart.report.account import Account
from pipepart.report.graph_view import GraphView
from pipepart.report.timelines import pack
from pipepart.schedule import SCHEDULES, Timeline

__all__ = [
    "SCRIPTS",
    "MemoryModel",
    "embed_json",
    "make_payload",
    "read_asset",
    "render_page",
    "source_of",
    "stage_memory",
]

SCRIPTS = (
    "schedules.js",
    "simulate.js",
    "greedy.js",
    "searched.js",
    "timeline.js",
    "dom.js",
    "summary.js",
    "stages.js",
    "gantt.js",
    "hierarchy.js",
    "layout.js",
    "graph.js",
    "details.js",
    "whatif.js",
    "app.js",
)
"""Scripts in the order in which they run; each adds to one global object, ``pipepart``."""

EXACT_EVENTS = 20_000
"""Timelines of more events are written with ten significant digits, which halves their size."""


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """Figures of memory that replace those of the plan; None keeps a figure of the plan."""

    optimizer_states: float | None = None
    """Bytes that the optimizer keeps per byte of weights: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD."""
    limit: float | Sequence[float] | None = None
    """Bytes of a device, or one number for each stage."""

    def limits(self, plan: Plan) -> list[float | None]:
        if self.limit is None or isinstance(self.limit, (int, float)):
            return [plan.memory_limit if self.limit is None else self.limit] * plan.stages
        if len(self.limit) != plan.stages:
            raise PlanError(
                f"memory limit: expected one number or {plan.stages}, one for each stage, got {len(self.limit)}"
            )
        return list(self.limit)


USUAL_STATES = 2.0
"""Optimizer states of Adam, for plans without figures of memory."""


def stage_memory(plan: Plan, memory: MemoryModel | None = None) -> list[dict[str, float | None]]:
    """Return for each stage the bytes of weights, gradients, optimizer state, activations at their peak, scratch and limit."""
    memory = memory or MemoryModel()
    found: list[dict[str, float | None]] = []
    for stage, limit in enumerate(memory.limits(plan)):
        if plan.memory:
            held = plan.memory[stage]
            row: dict[str, float | None] = dataclasses.asdict(held)
        else:
            weights = float(sum(chunk.parameter_bytes for chunk in plan.chunks if chunk.stage == stage))
            live = plan.timeline.peak_activations[stage]
            row = {"weights": weights, "gradients": weights, "optimizer": weights * USUAL_STATES, "activations": live}
            row["scratch"] = 0.0
        if memory.optimizer_states is not None:
            row["optimizer"] = float(row["weights"] or 0.0) * memory.optimizer_states
        found.append({**row, "limit": limit})
    return found


def make_payload(
    plan: Plan,
    *,
    title: str,
    graph: GraphView | None = None,
    measured: Timeline | None = None,
    measured_step: float | None = None,
    compare: Plan | None = None,
    memory: MemoryModel | None = None,
    account: Account | None = None,
) -> dict[str, Any]:
    """Return the whole document. Without `graph` the ops are known by name only."""
    if graph is not None and graph.name != plan.ops:
        raise PlanError(
            f"the graph belongs to another plan: it has {len(graph)} ops, the plan has {len(plan.ops)}, or names differ. "
            "Give the graph that was planned, or leave it out."
        )
    if measured is not None and measured.stages != plan.stages:
        raise PlanError(
            f"the measured timeline has {measured.stages} stages; expected {plan.stages}, as the plan has. Give a trace of "
            "this plan."
        )
    if measured_step is None and measured is not None:
        measured_step = measured.step_time
    if measured is not None and (measured.edges is None or not measured.activation):
        measured = Timeline(
            measured.stages, measured.events, plan.edges, plan.costs.activation, measured.kept_for_weight
        )
    view = graph or GraphView.from_names(plan.ops, plan.graph_hash)
    return {
        "version": 1,
        "title": title,
        "plan": _plan(plan, memory),
        "compare": None if compare is None else _plan(compare, memory),
        "same_ops": compare is not None and compare.ops == plan.ops,
        "measured": None if measured is None else _packed(measured),
        "measured_step": measured_step,
        "account": None if account is None else dataclasses.asdict(account),
        "graph": _graph(view, known=graph is not None),
        "schedules": {name: kind.summary for name, kind in SCHEDULES.items()},
        "optimizer_states": _states(plan, memory),
    }


def _states(plan: Plan, memory: MemoryModel | None) -> float | None:
    """Return the optimizer states per weight that were assumed. None: those of the plan."""
    if memory is not None and memory.optimizer_states is not None:
        return memory.optimizer_states
    return None if plan.memory else USUAL_STATES


def _packed(timeline: Timeline) -> dict[str, Any]:
    return pack(timeline, 10 if len(timeline.events) > EXACT_EVENTS else None)


_PLAN_FIGURES = (
    "hash", "graph_hash", "stages", "chunks_per_stage", "replicas", "microbatches", "microbatch_size", "schedule", "slack",
    "placement", "chunk_of", "step_time", "rehearsed", "predicted", "lower_bound", "gap", "bottleneck_gap", "proved",
    "bubble", "cost_source", "method", "baselines", "tried", "cluster",
)  # fmt: skip


def _plan(plan: Plan, memory: MemoryModel | None) -> dict[str, Any]:
    costs = plan.costs
    samples = plan.batch_size * plan.replicas
    return {
        **{name: getattr(plan, name) for name in _PLAN_FIGURES},
        "chunks": [dataclasses.asdict(chunk) for chunk in plan.chunks],
        "traffic": [dataclasses.asdict(item) for item in plan.traffic],
        "throughput": samples / plan.predicted if plan.predicted else None,
        "recompute": plan.recomputes,
        "costs": {
            **{field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)},
            "send_forward": [[*pair, seconds] for pair, seconds in sorted(costs.send_forward.items())],
            "send_backward": [[*pair, seconds] for pair, seconds in sorted(costs.send_backward.items())],
        },
        "edges": {
            "forward": sorted(plan.edges.forward),
            "backward": sorted(plan.edges.backward),
            "tied": plan.edges.tied,
        },
        "timeline": _packed(plan.timeline),
        "memory": stage_memory(plan, memory),
    }


def _graph(view: GraphView, known: bool) -> dict[str, Any]:
    """Return the columns of the ops; repeated words (modules, shapes) are numbers in a table."""
    words: dict[str, int] = {}

    def coded(values: Sequence[str]) -> list[int]:
        return [words.setdefault(value, len(words)) for value in values]

    columns: dict[str, Any] = {"name": view.name}
    for field in ("kind", "target", "module", "module_class", "source", "shape", "dtype"):
        columns[field] = coded(getattr(view, field))
    for field in ("output_bytes", "flops", "saved_bytes", "parameter_bytes"):
        columns[field] = getattr(view, field)
    for field in ("forward", "backward_input", "backward_weight"):
        columns[field] = [float(f"{seconds:.5g}") for seconds in getattr(view, field)]
    parameters = [coded(names) for names in view.parameters]
    return {
        "known": known,
        "hash": view.hash,
        "columns": columns,
        "words": list(words),
        "parameters": parameters,
        "edges": [op for edge in view.edges for op in edge],
        "tied": view.tied,
    }


def read_asset(name: str) -> str:
    return resources.files("pipepart.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def embed_json(data: Any) -> str:
    """Return JSON for a script element: no name in it can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def source_of(text: str) -> str:
    """Return the name of an inline script or style in the content security policy: only these bytes may run."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def render_page(payload: dict[str, Any]) -> str:
    """Return one self-contained HTML document. Its policy forbids the network and every script but its own."""
    script = "\n" + "\n".join(read_asset(name) for name in SCRIPTS)
    style = "\n" + read_asset("style.css")
    policy = (
        f"default-src 'none'; script-src {source_of(script)}; style-src {source_of(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    filled = {
        "policy": html.escape(policy),
        "title": html.escape(str(payload["title"])),
        "style": style,
        "script": script,
        "data": embed_json(payload),
    }
    page = read_asset("page.html")
    parts = page.split("{{")
    text = parts[0]
    for part in parts[1:]:
        name, rest = part.split("}}", 1)
        text += filled[name.strip()] + rest
    return text
