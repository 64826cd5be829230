"""The account of a step: the parts of its time, which add up to it, and what replicas without a pipeline would take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pipepart.errors import PlanError
from pipepart.files import load_json, write_whole
from pipepart.planning.plan import Plan
from pipepart.report.advice import advice
from pipepart.report.replicas_only import Alternative, replicas_only
from pipepart.schedule import COMPUTE, Action, ChunkCosts, Event, Timeline, simulate
from pipepart.values import Positive, Range

__all__ = ["Account", "MeanStep", "Part", "account_of", "load_account", "save_account"]

VERSION = 1
Seconds = Annotated[float, Range(0, 1e9)]


@dataclass(frozen=True)
class MeanStep:
    """The mean of the usual steps of a run, as the first stage saw them, in seconds."""

    steps: int
    """The number of steps that the mean is of."""
    whole: float
    """From the request for a batch to the request for the next one."""
    pipeline: float
    """Forward and backward of all micro-batches."""
    optimizer: float
    """The update, with clipping and the hooks around it."""
    input: float
    """The wait for the batch, and its move to the device."""
    traced: float | None = None
    """The pipeline in the step whose timeline was recorded; None: not known."""


@dataclass(frozen=True)
class Part:
    """One part of the time of a step."""

    name: str
    seconds: Seconds
    meaning: str
    """What the time was spent on, for a reader who has not seen the name before."""


@dataclass(frozen=True)
class Account:
    """Where the time of a usual step goes, as a mean over all devices."""

    steps: Positive
    """The number of measured steps."""
    step: Seconds
    """Seconds of a step, with everything that Lightning does between two batches."""
    parts: tuple[Part, ...]
    """They add up to the step."""
    stages: Positive
    replicas: Positive
    alternatives: tuple[Alternative, ...]
    """Replicas without a pipeline, on the same devices and the same batch."""
    advice: str
    """Whether a pipeline is worth it here, and what would help most."""

    def seconds(self, name: str) -> float:
        """Return the seconds of a part."""
        return next(part.seconds for part in self.parts if part.name == name)


MEANINGS = {
    "compute": "forwards and backwards",
    "bubble": "waiting that the schedule needs even if all stages are equally fast",
    "imbalance": "waiting because some stages or micro-batches take longer than others",
    "communication": "waiting for messages and sums that compute does not hide",
    "overhead": "between the calls of a stage: dividing the batch, starting chunks, collecting results",
    "optimizer": "the update, with clipping and the hooks around it",
    "input": "waiting for the next batch, and moving it to the device",
    "trainer": "Lightning's loop, callbacks, loggers and hooks",
}
"""The names of the parts, in their order, with their meaning."""


def account_of(plan: Plan, timeline: Timeline, mean: MeanStep) -> Account | None:
    """Return the account of a run from its plan, a measured timeline and its mean step.

    The timeline of one step divides the time of the pipeline; it is scaled to the mean step. None if the timeline is of
    another schedule than the plan.
    """
    idle = _idle(plan, timeline)
    if idle is None or mean.whole <= 0:
        return None
    scale = mean.pipeline / max(mean.traced or 0.0, timeline.step_time)
    compute = sum(timeline.busy) / timeline.stages * scale
    waits = {name: seconds * scale for name, seconds in idle.items()}
    found = {"compute": compute, **waits, "optimizer": mean.optimizer, "input": mean.input}
    found["overhead"] = max(0.0, mean.pipeline - compute - sum(waits.values()))
    found["trainer"] = max(0.0, mean.whole - sum(found.values()))
    parts = tuple(Part(name, found[name], meaning) for name, meaning in MEANINGS.items())
    backward = sum(e.duration for mine in timeline.compute for e in mine if e.action.kind != "F")
    others = replicas_only(
        plan,
        compute=compute,
        backward=backward / timeline.stages * scale,
        optimizer=mean.optimizer,
        around=found["input"] + found["trainer"],
    )
    whole = sum(found.values())
    account = Account(mean.steps, whole, parts, plan.stages, plan.replicas, others, "")
    return replace(account, advice=advice(plan, whole, found, others))


def _idle(plan: Plan, timeline: Timeline) -> dict[str, float] | None:
    """Return the mean waiting of a stage in a measured timeline, by its cause. Gaps between events are not waiting."""
    measured = {_key(e.action): e.duration for mine in timeline.compute for e in mine}
    count = 1 + max((e.action.microbatch for mine in timeline.compute for e in mine), default=-1)
    if not 0 < count <= plan.microbatches or plan.stages != timeline.stages:
        return None
    schedule = plan.make_schedule(count)
    actions = [action for mine in schedule.actions for action in mine if action.kind in COMPUTE]
    if {_key(action) for action in actions} != set(measured):
        return None
    mean = sum(timeline.busy) / timeline.stages
    level = [mean / busy if busy else 1.0 for busy in timeline.busy]

    def length(seconds: Callable[[Action], float]) -> float:
        ones = (1.0,) * len(plan.placement)
        costs = ChunkCosts(ones, ones, ones, backward=ones)
        return simulate(schedule, costs, plan.edges, scale=seconds).step_time

    even = length(lambda action: measured[_key(action)] * level[plan.placement[action.chunk]])
    as_it_is = length(lambda action: measured[_key(action)])
    gaps = sum(map(_gaps, _by_stage(timeline))) / timeline.stages
    left = max(0.0, timeline.step_time - mean - gaps)
    found: dict[str, float] = {}
    for name, seconds in (("bubble", even - mean), ("imbalance", as_it_is - even), ("communication", left)):
        found[name] = min(left, max(0.0, seconds))
        left -= found[name]
    return found


def _key(action: Action) -> tuple[str, int, int]:
    return action.kind, action.chunk, action.microbatch


def _by_stage(timeline: Timeline) -> list[list[Event]]:
    found: list[list[Event]] = [[] for _ in range(timeline.stages)]
    for event in timeline.events:
        found[event.stage].append(event)
    return found


def _gaps(events: list[Event]) -> float:
    """Return the seconds between the first and the last compute of a stage in which no event was recorded."""
    compute = [event for event in events if event.action.kind in COMPUTE]
    if not compute:
        return 0.0
    reached, end, found = compute[0].start, max(event.end for event in compute), 0.0
    for event in sorted(events, key=lambda event: event.start):
        found += max(0.0, min(event.start, end) - reached)
        reached = max(reached, event.end)
        if reached >= end:
            break
    return found


# ---- files


def save_account(path: str | Path, account: Account) -> Path:
    """Write an account as JSON."""
    text = json.dumps({"pipepart": "account", "version": VERSION, **asdict(account)}, indent=1, allow_nan=False)
    write_whole(path, text + "\n")
    return Path(path)


def load_account(path: str | Path) -> Account:
    """Read a file of `save_account`."""
    if not os.path.exists(path):
        raise PlanError(f"there is no account of a step at {str(path)!r}")
    file = load_json(path)
    data = dict(file.entries())
    if (data.pop("pipepart", None), data.pop("version", None)) != ("account", VERSION):
        raise PlanError(f"{str(path)!r} is not an account of version {VERSION}. Train again.")
    found = replace(file, value=data).read(Account)
    if [part.name for part in found.parts] != list(MEANINGS):
        raise file.at("parts").refused(f"the parts {', '.join(MEANINGS)}")
    return found
