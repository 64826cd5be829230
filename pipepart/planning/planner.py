"""From a costed graph to a plan for a given mesh and micro-batch size: try what is allowed, take the best in simulation."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from pipepart.cost import OpCosts
from pipepart.errors import PartitionError, PlanError
from pipepart.graph import OpGraph
from pipepart.planning.assembly import finish
from pipepart.planning.layout import LOCAL_LINK, Layout
from pipepart.planning.memory_shortage import nothing_fits
from pipepart.planning.plan import Plan
from pipepart.planning.pricing import ParameterSizes, Pricing
from pipepart.planning.request import Recipe, Request, auto_microbatches, check_request, recipes
from pipepart.planning.splits import Case, Split
from pipepart.schedule import peak_activations

__all__ = [
    "LOCAL_LINK",
    "Request",
    "auto_microbatches",
    "check_request",
    "choose",
    "make_plan",
    "named",
    "weighed",
]

_MORE_PARTS = 0.004
"""What a schedule must win to be worth its parts: with every further chunk, and with a split backward, there are more
actions and messages, each of which may be late."""

_NEAR = 1.08
"""How near to the best a recipe must be before the moves to get them."""


def make_plan(
    graph: OpGraph,
    costs: OpCosts | Sequence[OpCosts],
    request: Request,
    microbatch_size: int,
    sizes: ParameterSizes,
    *,
    layout: Layout | None = None,
    frozen: Collection[str] = (),
) -> Plan:
    """The best plan for this graph and request: every schedule that is asked for is tried, the shortest step wins.

    ``costs`` are those of one micro-batch, for all stages or for each. Without a ``layout`` all devices are equal and
    joined by ``request.link``.
    """
    per_stage = (costs,) if isinstance(costs, OpCosts) else tuple(costs)
    names = tuple(op.name for op in graph.ops)
    if any(one.names != names for one in per_stage):
        raise PlanError("the costs belong to another graph: their ops have other names. Measure the costs again.")
    if layout is None:
        limit = math.inf if request.memory_limit is None else request.memory_limit
        layout = Layout.uniform(
            request.stages, request.replicas, memory=limit, link=request.link, handling=request.handling
        )
    case = Case(Pricing(graph, per_stage, sizes, layout, request.optimizer_factor, frozen), request)
    splits, refused = choose(case, recipes(request))
    if not splits:
        assert refused is not None
        raise refused
    best = min(splits, key=weighed)
    if best.over > 0:
        raise nothing_fits(case, min(splits, key=lambda split: split.score))
    tried = tuple((named(split.recipe), split.step) for split in splits if split is not best and split.over <= 0)
    return finish(case, best, microbatch_size, tried)


def choose(case: Case, ways: Sequence[Recipe]) -> tuple[list[Split], PartitionError | None]:
    """The best split of each recipe that the model can be cut for; the first refusal if there is none."""
    quick: list[Split] = []
    refused = None
    for recipe in ways:
        try:
            quick.append(case.best(recipe, moves=False))
        except PartitionError as error:  # a model of few ops may be cut into p, but not into 2 p
            refused = refused or error
    if not quick:
        return [], refused
    # Moves take most of the time: for those that are near the best, or may fit by them.
    near = min(weighed(split) for split in quick)
    return [
        case.best(split.recipe) if split.over > 0 or split.step <= near[1] * _NEAR else split for split in quick
    ], None


def weighed(split: Split, weight: float = 1.0) -> tuple[float, float, float]:
    """What decides between splits: fits, then the step (with a small price for its parts), then fewer activations."""
    parts = split.recipe.chunks - 1 + (1 if split.schedule.splits_backward else 0)
    held = peak_activations(split.schedule, split.priced.costs(split.recompute).activation)
    return split.over, round(split.step * weight * (1 + _MORE_PARTS * parts), 9), max(held, default=0.0)


def named(recipe: Recipe) -> str:
    """A recipe as tables and messages call it."""
    more = f", {recipe.chunks} chunks" if recipe.chunks > 1 else ""
    return recipe.schedule + more + (f", slack {recipe.slack}" if recipe.slack else "")
