"""A plan as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from pipepart.planning.plan import Plan

__all__ = ["describe", "format_bytes", "format_seconds"]


def format_bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def describe(plan: Plan) -> str:
    """One row per chunk, then the figures of the whole."""
    head = ("stage", "chunk", "ops", "from", "to", "params", "saved/mb", "forward", "backward", "sends", "busy")
    rows: list[Sequence[str]] = []
    busy = plan.timeline.busy
    for index, chunk in enumerate(plan.chunks):
        sends = sum(t.forward_bytes for t in plan.traffic if t.source == index)
        sends += sum(t.backward_bytes for t in plan.traffic if t.target == index)
        rows.append(
            (
                str(chunk.stage),
                str(index),
                str(chunk.ops),
                _short(chunk.first),
                _short(chunk.last),
                f"{chunk.parameters:,}",
                format_bytes(chunk.saved_bytes),
                format_seconds(chunk.forward),
                format_seconds(chunk.backward),
                format_bytes(sends),
                f"{busy[chunk.stage] / plan.step_time:.0%}" if plan.step_time else "-",
            )
        )
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    left = {3, 4}

    def line(row: Sequence[str]) -> str:
        cells = (cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        return "  ".join(cells).rstrip()

    table = [line(head), line(["-" * w for w in widths]), *map(line, rows)]
    return "\n".join([*table, "", *_summary(plan)])


def _summary(plan: Plan) -> list[str]:
    samples = plan.batch_size * plan.replicas
    quality = (
        "slowest stage optimal (proved)"
        if plan.proved
        else f"slowest stage within {plan.bottleneck_gap:.1%} of optimal"
    )
    devices = f"{plan.replicas} replica(s) x {plan.stages} stage(s) = {plan.replicas * plan.stages} device(s)"
    lines = [
        f"mesh       {devices}",
        f"schedule   {plan.schedule}, {plan.microbatches} micro-batches of {plan.microbatch_size}"
        + (f", slack {plan.slack}" if plan.slack else ""),
        f"predicted  step {format_seconds(plan.step_time)}, bubble {plan.bubble:.1%}"
        + (f", {samples / plan.step_time:.0f} samples/s" if plan.step_time else ""),
        f"bound      no split and no schedule can be faster than {format_seconds(plan.lower_bound)} (gap {plan.gap:.1%})",
        f"split      {quality}; costs: {plan.cost_source}; {plan.method}",
    ]
    if plan.baselines and plan.step_time:
        against = ", ".join(f"{seconds / plan.step_time:.2f} x {name}" for name, seconds in plan.baselines)
        lines.append(f"against    {against} (throughput)")
    skips = [t for t in plan.traffic if t.skip]
    if skips:
        named = ", ".join(f"{t.source}>{t.target} {format_bytes(t.forward_bytes)}" for t in skips)
        lines.append(f"skips      {named}")
    return lines


def _short(path: str, width: int = 28) -> str:
    return path if len(path) <= width else "..." + path[-(width - 3) :]
