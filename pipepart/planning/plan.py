"""The plan: the frozen result of planning. Everything after it only reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipepart.errors import PlanError
from pipepart.planning.plan_parts import ChunkPlan, StageMemory, Tie, Traffic, simulator_costs, simulator_edges
from pipepart.schedule import ChunkCosts, Edges, Schedule, Timeline, from_csv, make_schedule, simulate

__all__ = ["VERSION", "ChunkPlan", "Plan", "StageMemory", "Tie", "Traffic"]

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Chunks, placement, replicas, micro-batches and schedule, with the predicted step and how good it can be at most."""

    graph_hash: str
    ops: tuple[str, ...]
    chunk_of: tuple[int, ...]
    """Op -> chunk, in the order of `ops`."""
    placement: tuple[int, ...]
    """Chunk -> stage."""
    replicas: int
    microbatches: int
    microbatch_size: int
    schedule: str
    slack: int
    chunks: tuple[ChunkPlan, ...]
    traffic: tuple[Traffic, ...]
    bottleneck_gap: float
    """How much the slowest stage is above the least possible one at most, as a fraction; 0: proved to be the best."""
    lower_bound: float
    """No partition of this graph into this many stages can give a shorter step, with any schedule (by these costs)."""
    cost_source: str
    method: str
    """How the partition was found."""
    baselines: tuple[tuple[str, float], ...] = ()
    """Simulated step time of simpler partitions under the same schedule, by name."""
    recompute: tuple[bool, ...] = ()
    """Per chunk: keep only its inputs, and run its forward again before its backward. Empty: no chunk does."""
    memory: tuple[StageMemory, ...] = ()
    """Per stage."""
    memory_limit: float | None = None
    """Bytes that a stage may use: the least over the devices; None: not known."""
    cluster: str = ""
    """The cluster that the plan was made for; empty: the devices that run it."""
    tried: tuple[tuple[str, float], ...] = ()
    """The best simulated step time of other shapes and schedules that were tried, by what they are."""
    ties: tuple[Tie, ...] = ()
    """What stages have in common, in the order in which it is summed."""
    actions: str = ""
    """The action lists of a schedule that has no name (it came from a file), in the CSV format of torch."""
    rehearsed: float | None = None
    """Seconds that a step took when the plan was tried out on the devices that run it; None: it was not."""
    version: int = VERSION

    @property
    def stages(self) -> int:
        return max(self.placement) + 1

    @property
    def chunks_per_stage(self) -> int:
        return len(self.placement) // self.stages

    @property
    def batch_size(self) -> int:
        """Samples of one replica and step that the plan was made for."""
        return self.microbatches * self.microbatch_size

    @property
    def step_time(self) -> float:
        """Seconds of one step by the costs of its ops: what plans are compared by."""
        return self.timeline.step_time

    @property
    def predicted(self) -> float:
        """What a step is expected to take: as rehearsed, or by the costs of its ops where there was no rehearsal."""
        return self.step_time if self.rehearsed is None else self.rehearsed

    @property
    def bubble(self) -> float:
        return self.timeline.bubble

    @property
    def gap(self) -> float:
        """How much the predicted step is above the lower bound, as a fraction of it."""
        return max(0.0, self.step_time / self.lower_bound - 1.0) if self.lower_bound > 0 else 0.0

    @property
    def proved(self) -> bool:
        """No other split has a faster slowest stage."""
        return self.bottleneck_gap < 1e-9

    @cached_property
    def hash(self) -> str:
        """Of what was planned; how a rehearsal of it went does not count."""
        planned = dataclasses.replace(self, rehearsed=None)
        return hashlib.sha256(planned.to_json(indent=None).encode()).hexdigest()[:16]

    @cached_property
    def costs(self) -> ChunkCosts:
        """The chunk costs that the simulator takes."""
        return simulator_costs(self.chunks, self.traffic, self.ties, self.recomputes)

    @property
    def recomputes(self) -> tuple[bool, ...]:
        """`recompute`, with an entry for every chunk also where no chunk does it."""
        return self.recompute or (False,) * len(self.chunks)

    @cached_property
    def edges(self) -> Edges:
        return simulator_edges(len(self.chunks), self.traffic, self.ties)

    def make_schedule(self, microbatches: int | None = None, forward: bool = False) -> Schedule:
        """The action lists for this plan, also for another number of micro-batches or for evaluation."""
        count = self.microbatches if microbatches is None else microbatches
        if forward:
            return make_schedule("forward", stages=self.stages, microbatches=count, placement=self.placement)
        if self.actions:
            return _first_microbatches(from_csv(self.actions, self.schedule), count)
        return make_schedule(
            self.schedule, stages=self.stages, microbatches=count, chunks=self.chunks_per_stage, slack=self.slack
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step."""
        return simulate(self.make_schedule(), self.costs, self.edges)

    def describe(self) -> str:
        """A table for the terminal."""
        from pipepart.planning.describe import describe

        return describe(self)

    # ---- files

    def to_json(self, indent: int | None = 1) -> str:
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise PlanError(f"there is no plan at {str(path)!r}. Save one with plan.save(path).") from error
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{str(path)!r}: not a plan: {error}") from error
        except PlanError as error:
            raise PlanError(f"{str(path)!r}: {error}") from error

    @staticmethod
    def from_json(text: str) -> Plan:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not a plan: {error}") from error
        if not isinstance(data, dict) or data.get("version") != VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise PlanError(
                f"not a plan of version {VERSION} (found: {found}). Make the plan again with this pipepart."
            )
        try:
            return Plan(**{name: _thaw(name, value) for name, value in data.items()})
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise PlanError(f"not a plan: {error}") from error


def _first_microbatches(schedule: Schedule, count: int) -> Schedule:
    """A schedule without the micro-batches from `count` on: what is left keeps its order, so it stays valid."""
    if count == schedule.microbatches:
        return schedule
    if count > schedule.microbatches:
        raise PlanError(f"schedule {schedule.name!r} is for {schedule.microbatches} micro-batches, asked for {count}")
    kept = tuple(tuple(action for action in actions if action.microbatch < count) for actions in schedule.actions)
    return Schedule(schedule.name, schedule.stages, count, schedule.placement, kept)


def _thaw(name: str, value: Any) -> Any:
    """JSON lists back to the tuples and dataclasses of a plan."""
    if name == "chunks":
        return tuple(ChunkPlan(**chunk) for chunk in value)
    if name == "traffic":
        return tuple(Traffic(**item) for item in value)
    if name == "memory":
        return tuple(StageMemory(**item) for item in value)
    if name == "ties":
        return tuple(Tie(tuple(item["chunks"]), item["size"], item["seconds"]) for item in value)
    if name in ("baselines", "tried"):
        return tuple((str(key), float(seconds)) for key, seconds in value)
    return tuple(value) if isinstance(value, list) else value
