"""Reports in files: the page of a plan, and a page from whatever lies in a run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipepart.cost import OpCosts
from pipepart.errors import PlanError
from pipepart.planning.plan import Plan
from pipepart.report.graph_view import GraphView, load_graph
from pipepart.report.page import render_page
from pipepart.report.payload import MemoryModel, make_payload
from pipepart.report.trace_file import load_timeline
from pipepart.schedule import Timeline

__all__ = ["RunFiles", "locate", "view", "write_report"]


def write_report(
    path: str | Path,
    plan: Plan,
    *,
    graph: Any | None = None,
    costs: OpCosts | None = None,
    measured: Timeline | None = None,
    measured_step: float | None = None,
    title: str = "pipepart",
    compare: Plan | None = None,
    optimizer_states: float | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Path:
    """Write one self-contained HTML page about a plan.

    `graph` is the `OpGraph` that was planned (or a `GraphView`), `costs` its per-op costs, `measured` a traced step,
    `measured_step` the seconds of a usual step (by default those of the traced one), `compare` a second plan.
    `optimizer_states` (how many times the weights the optimizer keeps) and `memory_limit` (bytes of a device) are taken
    from the plan unless they are given.
    """
    target = Path(path)
    payload = make_payload(
        plan,
        title=title,
        graph=None if graph is None else GraphView.of(graph, costs),
        measured=measured,
        measured_step=measured_step,
        compare=compare,
        memory=MemoryModel(optimizer_states, memory_limit),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render_page(payload), encoding="utf-8")
    return target


def _kind_of(path: Path) -> str:
    """What a JSON file holds: ``plan``, ``timeline`` or ``graph``."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{str(path)!r} cannot be read: {error}. Expected a plan, a trace or a run folder.") from error
    if isinstance(data, dict) and "pipepart" in data:
        return str(data["pipepart"])
    if isinstance(data, dict) and "chunk_of" in data:
        return "plan"
    raise PlanError(f"{str(path)!r} is neither a plan nor a trace. Expected plan.json, trace.json or a run folder.")


def _found(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, or the newest one below it."""
    direct = folder / name
    if direct.is_file():
        return direct
    below = sorted(folder.rglob(name), key=lambda path: path.stat().st_mtime)
    return below[-1] if below else None


@dataclass(frozen=True)
class RunFiles:
    """The files that belong together: a plan, and what lies beside it."""

    plan: Path
    trace: Path | None
    graph: Path | None


def locate(source: str | Path) -> RunFiles:
    """The files of a plan file, of a trace file that lies beside its plan, or of a run folder."""
    where = Path(source)
    if not where.exists():
        raise PlanError(f"there is nothing at {str(source)!r}. Expected a plan file, a trace file or a run folder.")
    kind = "folder" if where.is_dir() else _kind_of(where)
    folder = where if where.is_dir() else where.parent
    plan = where if kind == "plan" else _found(folder, "plan.json") if kind == "folder" else folder / "plan.json"
    if plan is None or not plan.is_file():
        raise PlanError(f"no plan.json in {str(folder)!r}: a page needs the plan. Save it there with plan.save(path).")
    trace = where if kind == "timeline" else plan.parent / "trace.json"
    graph = where if kind == "graph" else plan.parent / "graph.json"
    return RunFiles(plan, trace if trace.is_file() else None, graph if graph.is_file() else None)


def view(
    source: str | Path, output: str | Path | None = None, *, compare: str | Path | None = None, title: str | None = None
) -> Path:
    """Make a page from a plan file, a trace file that lies beside its plan, or a run folder; returns where it is.

    A run folder holds `plan.json`, and maybe `trace.json` (a measured step) and `graph.json` (names and places of ops).
    `compare` names a second plan (or its folder) to show beside it.
    """
    files = locate(source)
    plan = Plan.load(files.plan)
    graph = load_graph(files.graph) if files.graph else None
    if graph is not None and graph.name != plan.ops:
        graph = None  # of another plan that was here before
    beside = files.plan.parent
    return write_report(
        Path(output) if output is not None else beside / "report.html",
        plan,
        graph=graph,
        measured=load_timeline(files.trace) if files.trace else None,
        title=title if title is not None else (beside.resolve().name or "pipepart"),
        compare=None if compare is None else Plan.load(locate(compare).plan),
    )
