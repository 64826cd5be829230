"""Reports in files: the page of a plan, and the page of a run folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipepart.cost import OpCosts
from pipepart.errors import PlanError
from pipepart.files import load_json, write_whole
from pipepart.planning.plan import Plan
from pipepart.report.account import Account, load_account
from pipepart.report.graph_view import GraphView, load_graph
from pipepart.report.page import MemoryModel, make_payload, render_page
from pipepart.report.timelines import load_timeline
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
    account: Account | None = None,
) -> Path:
    """Write one self-contained HTML page about a plan.

    `graph` is the `OpGraph` that was planned (or a `GraphView`), `costs` its per-op costs, `measured` a traced step,
    `measured_step` the seconds of a usual step (by default those of the traced one), `compare` a second plan.
    `optimizer_states` (bytes of optimizer state per byte of weights) and `memory_limit` (bytes of a device) replace the
    figures of the plan. `account` says where the time of a step went.
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
        account=account,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, render_page(payload))
    return target


def _kind_of(path: Path) -> str:
    """Return the kind of a JSON file: ``plan``, ``timeline`` or ``graph``."""
    data = load_json(path).value
    kind = data.get("pipepart", "plan" if "chunk_of" in data else None) if isinstance(data, dict) else None
    if kind in ("plan", "timeline", "graph"):
        return str(kind)
    raise PlanError(f"{str(path)!r} is neither a plan nor a trace. Expected plan.json, trace.json or a run folder.")


def _found(folder: Path, name: str) -> Path | None:
    """Return the file of that name in a folder, or the newest one below it."""
    direct = folder / name
    if direct.is_file():
        return direct
    below = sorted(folder.rglob(name), key=lambda path: path.stat().st_mtime)
    return below[-1] if below else None


@dataclass(frozen=True)
class RunFiles:
    """A plan file, and the trace, the graph and the account of a step beside it."""

    plan: Path
    trace: Path | None
    graph: Path | None
    account: Path | None


def locate(source: str | Path) -> RunFiles:
    """Find the files of a run, from its plan file, from a trace file beside the plan, or from its folder."""
    where = Path(source)
    if not os.path.exists(where):
        raise PlanError(f"there is nothing at {str(source)!r}. Expected a plan file, a trace file or a run folder.")
    kind = "folder" if where.is_dir() else _kind_of(where)
    folder = where if where.is_dir() else where.parent
    plan = where if kind == "plan" else _found(folder, "plan.json") if kind == "folder" else folder / "plan.json"
    if plan is None or not plan.is_file():
        raise PlanError(f"no plan.json in {str(folder)!r}: a page needs the plan. Save it there with plan.save(path).")
    trace = where if kind == "timeline" else plan.parent / "trace.json"
    graph = where if kind == "graph" else plan.parent / "graph.json"
    account = plan.parent / "account.json"
    return RunFiles(plan, *(path if path.is_file() else None for path in (trace, graph, account)))


def view(
    source: str | Path, output: str | Path | None = None, *, compare: str | Path | None = None, title: str | None = None
) -> Path:
    """Write a page from a plan file, a trace file beside its plan, or a run folder, and return its path.

    A run folder holds `plan.json`, and optionally `trace.json` (a measured step), `graph.json` (names and places of ops)
    and `account.json` (where the time of a step went). `compare` is the path of a second plan, or of its folder, to show
    beside the first.
    """
    files = locate(source)
    plan = Plan.load(files.plan)
    graph = load_graph(files.graph) if files.graph else None
    if graph is not None and graph.name != plan.ops:
        graph = None  # it belongs to another plan
    beside = files.plan.parent
    return write_report(
        Path(output) if output is not None else beside / "report.html",
        plan,
        graph=graph,
        measured=load_timeline(files.trace) if files.trace else None,
        account=load_account(files.account) if files.account else None,
        title=title if title is not None else (beside.resolve().name or "pipepart"),
        compare=None if compare is None else Plan.load(locate(compare).plan),
    )
