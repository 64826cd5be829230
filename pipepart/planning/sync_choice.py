"""The choice of `sync="auto"`: among the modes that give the result of `mean`, the one with the shortest step that fits.

`sharded` is looked at where the optimizer states of `mean` make a stage too full: nothing fits, or chunks must recompute.
`fsdp` is looked at where `sharded` does not fit. Where several replicas are on each of several hosts, sums in two levels are
compared with those in one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipepart.errors import ConfigError, PlanError
from pipepart.planning.plan import Plan
from pipepart.planning.request import PlanRequest
from pipepart.planning.sync_memory import gather_of
from pipepart.planning.sync_mode import SyncMode
from pipepart.planning.sync_prices import FSDP_BY_VISIT, SyncPrice, sync_prices

__all__ = ["chosen_sync", "planned_with_sync"]

_CLEARLY = 0.97
"""The part of the step of `mean` below which another way is taken."""


def planned_with_sync(search: Callable[[PlanRequest], Plan], request: PlanRequest) -> Plan:
    """Return the best plan over the modes that give one result, with the mode in `plan.sync`."""
    failure: PlanError | None = None
    found: list[tuple[float, Plan]] = []
    for mode in ("mean", "sharded", "fsdp"):
        if found and (mode == "fsdp" or not any(found[0][1].recomputes)):
            break  # the states fit
        try:
            plan = search(replace(request, sync=mode))
        except PlanError as error:
            failure = failure or error
            continue
        found.append(_priced(plan, request, mode))
        if plan.replicas == 1:
            break
    if not found:
        assert failure is not None
        raise failure
    return min(found, key=lambda one: one[0])[1]


def _priced(plan: Plan, request: PlanRequest, mode: str) -> tuple[float, Plan]:
    """Return the seconds that make plans comparable, and the plan with its mode."""
    layout = request.layout(plan.stages, plan.replicas)
    prices = {price.name: price for price in sync_prices(plan, layout, request.optimizer_factor)}
    option: Any = mode
    name = mode
    if mode == "fsdp" and gather_of(SyncMode.of(mode), plan).gather == "microbatch" and FSDP_BY_VISIT in prices:
        name = FSDP_BY_VISIT
    seconds = prices[name].step if prices else plan.step_time
    nested = next((price for name, price in prices.items() if name.startswith("mean, inside ")), None)
    if mode == "mean" and nested is not None and nested.step < _CLEARLY * seconds:
        option, seconds = {"mode": "mean", "inside": _size_of(nested)}, nested.step
    return seconds * request.weight(plan.replicas), replace(plan, sync=json.dumps(option))


def _size_of(price: SyncPrice) -> int:
    return int(price.name.rpartition(" ")[2])


def chosen_sync(plan: Plan) -> Any:
    """Return the option `sync` that a plan has chosen; ``"mean"`` for a plan that was made without a choice."""
    try:
        option = json.loads(plan.sync) if plan.sync else "mean"
        known = SyncMode.of(option).mode in ("mean", "sharded", "fsdp")
    except (ValueError, ConfigError):  # the plan is from a file
        known = False
    if not known:
        raise PlanError(f"sync of the plan is {plan.sync!s:.80}; expected 'mean', 'sharded' or 'fsdp' with settings")
    return option
