"""If nothing fits into memory: by how much, on which stage, and what would fit."""

from __future__ import annotations

import dataclasses

from pipepart.errors import PlanError
from pipepart.partition import Link
from pipepart.planning.describe import format_bytes
from pipepart.planning.layout import Layout
from pipepart.planning.pricing import Pricing
from pipepart.planning.request import Recipe
from pipepart.planning.sources import scaled
from pipepart.planning.splits import Case, Split

__all__ = ["nothing_fits", "what_would_fit"]


def nothing_fits(case: Case, best: Split) -> PlanError:
    """The error for a mesh on which no split fits; ``best`` is the one that is least over the limit."""
    pricing = case.pricing
    memory = pricing.memory.of_stages(best.chunk_of, best.priced, best.schedule, best.recompute)[best.worst]
    limit = pricing.layout.memory[best.worst]
    where = f"stage {best.worst} of {case.shape.stages}"
    if pricing.layout.kinds:
        where += f" on {pricing.layout.kinds[best.worst]!r}"
    names = ("weights", "gradients", "optimizer", "activations", "scratch")
    parts = ", ".join(f"{name} {format_bytes(getattr(memory, name))}" for name in names)
    options = what_would_fit(case, best.recipe)
    advice = (
        f"Any of these would fit: {', or '.join(options)}."
        if options
        else "Neither recompute, nor micro-batches of a sixteenth, nor eight times the stages would fit alone: combine "
        "them, or use devices with more memory."
    )
    return PlanError(
        f"no split fits into memory: at best, {where} needs {format_bytes(memory.total)} ({parts}), "
        f"{format_bytes(best.over)} more than its {format_bytes(limit)} (schedule {best.recipe.schedule}, "
        f"{case.shape.microbatches} micro-batches). {advice}"
    )


def what_would_fit(case: Case, recipe: Recipe) -> list[str]:
    """Which single change makes it fit: recompute, smaller micro-batches, more stages. Each one is really tried."""
    request, shape, layout = case.request, case.shape, case.pricing.layout
    options = []
    if request.recompute is False:
        again = Case(case.pricing, dataclasses.replace(request, recompute="auto"), shape)
        if again.fits(recipe):
            options.append("recompute='auto'")
    for part in (2, 4, 8, 16):
        smaller = dataclasses.replace(case.pricing, costs=tuple(scaled(one, 1 / part) for one in case.pricing.costs))
        more = dataclasses.replace(shape, microbatches=shape.microbatches * part)
        if Case(smaller, request, more).fits(recipe):
            options.append(f"microbatches={more.microbatches} (micro-batches of 1/{part} of the size)")
            break
    if len(case.pricing.costs) == 1 and request.split_at is None:
        p = shape.stages
        for stages in sorted({p + 1, p + p // 2, 2 * p, 4 * p, 8 * p} - {p}):
            wider = Layout.uniform(stages, layout.replicas, memory=min(layout.memory), link=_a_link(layout))
            pricing: Pricing = dataclasses.replace(case.pricing, layout=wider)
            if Case(pricing, request, dataclasses.replace(shape, stages=stages)).fits(recipe):
                options.append(f"stages={stages}")
                break
    return options


def _a_link(layout: Layout) -> Link:
    return layout.link(0, 1) if layout.stages > 1 else layout.within
