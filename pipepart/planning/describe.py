"""A plan as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from pipepart.planning.chunks import StageMemory
from pipepart.planning.plan import Plan
from pipepart.values import printable

__all__ = ["describe", "describe_memory", "format_bytes", "format_seconds"]


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
    """Return one row per chunk, then the figures of the whole plan.

    The memory of a stage is in the row of its first chunk; `*` marks chunks that recompute.
    """
    head = (
        "stage", "chunk", "ops", "from", "to", "params", "memory", "saved/mb", "forward", "backward", "sends", "busy",
    )  # fmt: skip
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
                _stage_memory(plan, chunk.stage) if plan.placement.index(chunk.stage) == index else "",
                format_bytes(chunk.saved_bytes) + ("*" if plan.recomputes[index] else ""),
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
    return printable("\n".join([*table, "", *_summary(plan)]), keep="\n")


def _summary(plan: Plan) -> list[str]:
    samples = plan.batch_size * plan.replicas
    quality = (
        "the slowest stage is optimal (proved)"
        if plan.proved
        else f"the slowest stage is at most {plan.bottleneck_gap:.1%} above the optimal bottleneck"
    )
    devices = f"{plan.replicas} replica(s) x {plan.stages} stage(s) = {plan.replicas * plan.stages} device(s)"
    lines = [
        f"mesh       {devices}" + (f" of {plan.cluster}" if plan.cluster else ""),
        f"schedule   {plan.schedule}, {plan.microbatches} micro-batches of {plan.microbatch_size}"
        + (f", {plan.chunks_per_stage} chunks per stage" if plan.chunks_per_stage > 1 else "")
        + (f", slack {plan.slack}" if plan.slack else ""),
        f"predicted  step {format_seconds(plan.step_time)}, bubble {plan.bubble:.1%}"
        + (f", {samples / plan.step_time:.0f} samples/s" if plan.step_time else ""),
        *_rehearsal(plan, samples),
        f"bound      with {plan.stages} stage(s) and {plan.microbatches} micro-batches nothing is faster than "
        f"{format_seconds(plan.lower_bound)} (gap {plan.gap:.1%})",
        f"split      {quality}; costs: {plan.cost_source}; {plan.method}",
        f"limits     {_limits(plan)}",
        *([f"sync       {plan.sync}, chosen by price"] if plan.sync and plan.replicas > 1 else []),
        *_head(plan),
        *_memory(plan),
        *_links(plan),
    ]
    if plan.baselines and plan.step_time:
        against = ", ".join(f"{seconds / plan.step_time:.2f} x {name}" for name, seconds in plan.baselines)
        lines.append(f"against    {against} (throughput)")
    if plan.tried:
        others = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in plan.tried[:4])
        lines.append(f"tried      {others}")
    skips = [t for t in plan.traffic if t.skip]
    if skips:
        named = ", ".join(f"{t.source}>{t.target} {format_bytes(t.forward_bytes)}" for t in skips)
        lines.append(f"skips      {named}")
    return lines


def _rehearsal(plan: Plan, samples: int) -> list[str]:
    if not plan.rehearsed:
        return []
    longer = plan.rehearsed / plan.step_time - 1 if plan.step_time else 0.0
    return [
        f"rehearsed  step {format_seconds(plan.rehearsed)} ({longer:+.0%}), {samples / plan.rehearsed:.0f} samples/s"
    ]


def _stage_memory(plan: Plan, stage: int) -> str:
    return format_bytes(plan.memory[stage].total) if plan.memory else "-"


def describe_memory(memory: StageMemory) -> str:
    """Return the parts of the memory of a stage."""
    names = ("weights", "gradients", "optimizer", "activations", "scratch")
    return ", ".join(f"{name} {format_bytes(getattr(memory, name))}" for name in names)


def _memory(plan: Plan) -> list[str]:
    """Return the line of the fullest stage."""
    if not plan.memory:
        return []
    worst = max(range(plan.stages), key=lambda stage: plan.memory[stage].total)
    full = plan.memory[worst]
    again = sum(plan.recomputes)
    return [
        f"memory     at most {format_bytes(full.total)} on stage {worst}: {describe_memory(full)}"
        + (f"; limit {format_bytes(plan.memory_limit)}" if plan.memory_limit is not None else "")
        + (f" ({plan.memory_source})" if plan.memory_source else "")
        + (f"; {again} of {len(plan.chunks)} chunks recompute" if again else "")
    ]


def _head(plan: Plan) -> list[str]:
    """Return the line of a head in slices, or the reason why it is whole."""
    if plan.head:
        return [f"head       in slices of {plan.head} tokens: the scores of all tokens are never held"]
    return [f"head       whole: {plan.head_note}"] if plan.head_note else []


def _links(plan: Plan) -> list[str]:
    """Return the line of the measured links."""
    if not plan.links:
        return []
    shown = [f"{name} {format_bytes(speed)}/s + {format_seconds(latency)}" for name, speed, latency in plan.links]
    return [f"links      measured: {', '.join(shown)}"]


def _limits(plan: Plan) -> str:
    """Return the part of the step that limits its speed."""
    step, busy = plan.step_time, plan.timeline.busy
    if not step:
        return "nothing: no op takes time"
    slowest = max(range(plan.stages), key=busy.__getitem__)
    reduce = max(chunk.reduce for chunk in plan.chunks)
    if plan.stages == 1:
        return "the compute of the one stage" + (
            f" and {format_seconds(reduce)} for the sum of gradients" if reduce else ""
        )
    if busy[slowest] >= 0.9 * step:
        return f"stage {slowest}, busy for {busy[slowest] / step:.0%} of the step"
    links = max((t.forward_seconds + t.backward_seconds for t in plan.traffic), default=0.0)
    work = busy[slowest] / plan.microbatches
    if links > work:
        return (
            f"traffic: {format_seconds(links)} per micro-batch over the slowest cut, {format_seconds(work)} of compute"
        )
    if reduce > 0.1 * step:
        return f"summing gradients over the replicas: {format_seconds(reduce)}"
    return (
        f"filling and draining the pipeline: stage {slowest} is busy for {busy[slowest] / step:.0%} of the step; "
        "more micro-batches would shorten it"
    )


def _short(path: str, width: int = 28) -> str:
    path = printable(path)
    return path if len(path) <= width else "..." + path[-(width - 3) :]
