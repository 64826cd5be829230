"""The plan: the frozen result of planning, and its file. Everything after planning only reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipepart.errors import PipepartError, PlanError, did_you_mean
from pipepart.files import parse_json, read_text, write_whole
from pipepart.planning.chunks import ChunkPlan, StageMemory, Tie, Traffic, simulator_costs, simulator_edges
from pipepart.schedule import SCHEDULES, ChunkCosts, Edges, Schedule, Timeline, from_csv, make_schedule, simulate
from pipepart.values import Positive, shortened

if TYPE_CHECKING:
    from pipepart.planning.exported_plans import Exported

__all__ = ["VERSION", "Plan"]

VERSION = 1
_MOST_FORWARDS = 4_000_000
"""Chunks times micro-batches of a plan in a file: larger schedules would take minutes to simulate."""
_MOST_RANKS = 1_000_000
_LATER = frozenset({"memory_source", "links", "modules", "sync", "head", "head_note"})
"""Fields that the first files of this version lack."""


@dataclass(frozen=True)
class Plan:
    """Chunks, placement, replicas, micro-batches and schedule, with the predicted step and its lower bound."""

    graph_hash: str
    ops: tuple[str, ...]
    chunk_of: tuple[int, ...]
    """Op -> chunk, in the order of `ops`."""
    placement: tuple[int, ...]
    """Chunk -> stage."""
    replicas: Positive
    microbatches: Positive
    microbatch_size: Positive
    schedule: str
    slack: int
    chunks: tuple[ChunkPlan, ...]
    traffic: tuple[Traffic, ...]
    bottleneck_gap: float
    """The largest possible distance of the slowest stage from the optimum, as a fraction; 0: proved to be optimal."""
    lower_bound: float
    """Seconds of a step that no partition into as many stages can beat, with any schedule and the same costs."""
    cost_source: str
    method: str
    """The method that found the partition."""
    baselines: tuple[tuple[str, float], ...] = ()
    """Simulated step time of simpler partitions under the same schedule, by name."""
    recompute: tuple[bool, ...] = ()
    """Per chunk: whether it keeps only its inputs and runs its forward again before its backward. Empty: none does."""
    memory: tuple[StageMemory, ...] = ()
    """Memory of each stage at the peak of the step. Empty: not known."""
    memory_limit: float | None = None
    """Bytes that a stage may use: the least over the devices. None: not known."""
    cluster: str = ""
    """The cluster that the plan was made for. Empty: the devices that run it."""
    tried: tuple[tuple[str, float], ...] = ()
    """The best simulated step time of other shapes and schedules that were tried, by name."""
    ties: tuple[Tie, ...] = ()
    """Parameters that several stages use, in the order in which their gradients are summed."""
    actions: str = ""
    """The action lists of a schedule from a file, in the CSV format of torch. Empty: the schedule is known by name."""
    rehearsed: float | None = None
    """Seconds of a step in a rehearsal on the devices that run the plan. None: there was no rehearsal."""
    memory_source: str = ""
    """Where the memory limit comes from. Empty: not known, or no limit."""
    links: tuple[tuple[str, float, float], ...] = ()
    """The links of the job that were measured before planning: name, bytes per second, seconds. Empty: none were."""
    modules: tuple[str, ...] = ()
    """Op -> path of the module whose code calls it, in the order of `ops`; empty for inputs, numbers and ops that every
    chunk may compute for itself. Empty: not known."""
    sync: str = ""
    """The choice of ``sync="auto"``: the option in JSON. Empty: planning had no choice."""
    head: int = 0
    """Tokens for which a head computes its scores at a time. 0: those of a whole micro-batch."""
    head_note: str = ""
    """The reason why the head is whole, if slices were asked for. Empty: there is none."""
    version: int = VERSION

    @property
    def stages(self) -> int:
        """The devices of one pipeline."""
        return max(self.placement) + 1

    @property
    def chunks_per_stage(self) -> int:
        """The number of chunks on each stage."""
        return len(self.placement) // self.stages

    @property
    def batch_size(self) -> int:
        """Samples of one replica and step that the plan was made for."""
        return self.microbatches * self.microbatch_size

    @property
    def step_time(self) -> float:
        """Seconds of one step by the costs of its ops; plans are compared by it."""
        return self.timeline.step_time

    @property
    def predicted(self) -> float:
        """Expected seconds of a step: as rehearsed, or by the costs of its ops if there was no rehearsal."""
        return self.step_time if self.rehearsed is None else self.rehearsed

    @property
    def bubble(self) -> float:
        """The idle time of the devices in the predicted step, as a share of it."""
        return self.timeline.bubble

    @property
    def gap(self) -> float:
        """Distance of the predicted step from the lower bound, as a fraction of the bound."""
        return max(0.0, self.step_time / self.lower_bound - 1.0) if self.lower_bound > 0 else 0.0

    @property
    def proved(self) -> bool:
        """Whether no other split has a faster slowest stage."""
        return self.bottleneck_gap < 1e-9

    @cached_property
    def hash(self) -> str:
        """Hash of the plan without its rehearsal."""
        planned = dataclasses.replace(self, rehearsed=None)
        return hashlib.sha256(planned.to_json(indent=None).encode()).hexdigest()[:16]

    @cached_property
    def costs(self) -> ChunkCosts:
        """The chunk costs for the simulator."""
        return simulator_costs(self.chunks, self.traffic, self.ties, self.recomputes)

    @property
    def recomputes(self) -> tuple[bool, ...]:
        """`recompute` with an entry for every chunk, even if no chunk recomputes."""
        return self.recompute or (False,) * len(self.chunks)

    @cached_property
    def edges(self) -> Edges:
        return simulator_edges(len(self.chunks), self.traffic, self.ties)

    def make_schedule(self, microbatches: int | None = None, forward: bool = False) -> Schedule:
        """Return the action lists of this plan, or those for another number of micro-batches or for evaluation."""
        count = self.microbatches if microbatches is None else microbatches
        if forward:
            return make_schedule("forward", stages=self.stages, microbatches=count, placement=self.placement)
        if self.actions:
            return _first_microbatches(from_csv(self.actions, self.schedule), count)
        return make_schedule(
            self.schedule,
            stages=self.stages,
            microbatches=count,
            chunks=self.chunks_per_stage,
            slack=self.slack,
            costs=self.costs if SCHEDULES[self.schedule].takes_costs else None,
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step."""
        return simulate(self.make_schedule(), self.costs, self.edges)

    def describe(self) -> str:
        """Return a table for the terminal."""
        from pipepart.planning.describe import describe

        return describe(self)

    def export(
        self, target: Literal["megatron", "torchtitan", "torch"], *, layers: str | None = None, snap: bool = False
    ) -> Exported:
        """Return the plan in the form of Megatron-LM, of torchtitan, or of `torch.distributed.pipelining`.

        ``layers`` is the path of the module list that holds the layers, by default the one with the most members.
        ``snap=True`` moves cuts inside a layer to its border; without it they are refused.
        """
        from pipepart.planning.exported_plans import export

        return export(self, target, layers=layers, snap=snap)

    # ---- files

    def to_json(self, indent: int | None = 1) -> str:
        """Return the text of the file. Fields that older files lack are left out if they are empty, so hashes stay valid."""
        entries = dataclasses.asdict(self)
        kept = {name: value for name, value in entries.items() if value or name not in _LATER}
        return json.dumps(kept, indent=indent)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, which appears whole or not at all."""
        write_whole(path, self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a file."""
        if not os.path.exists(path):
            raise PlanError(f"there is no plan at {shortened(str(path), 300)}. Save one with plan.save(path).")
        try:
            return _read(read_text(path))
        except PipepartError as error:
            raise PlanError(f"{str(path)!r} is not a plan: {error}") from error

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan from the text of its file."""
        try:
            return _read(text)
        except PipepartError as error:
            raise PlanError(f"not a plan: {error}") from error


def _read(text: str) -> Plan:
    file = parse_json(text, "the file")
    version = file.entries().get("version")
    if version != VERSION:
        raise PlanError(
            f"the file has version {version!r:.40}; expected {VERSION}. Make the plan again with this version of pipepart."
        )
    plan = file.read(Plan)
    _check(plan)
    return plan


def _check(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other, or whose schedule is too large to simulate."""
    stages, chunks = max(plan.placement, default=-1) + 1, len(plan.placement)
    if not 1 <= stages <= chunks or len(set(plan.placement)) != stages or chunks % stages:
        raise PlanError(
            f"placement is {list(plan.placement)!s:.80}; expected equally many chunks on every stage from 0 on"
        )
    lengths = {
        "chunk_of": (len(plan.chunk_of), len(plan.ops)),
        "chunks": (len(plan.chunks), chunks),
        "recompute": (len(plan.recomputes), chunks),
        "modules": (len(plan.modules) or len(plan.ops), len(plan.ops)),
        "memory": (len(plan.memory) or stages, stages),
    }
    for name, (found, expected) in lengths.items():
        if found != expected:
            raise PlanError(f"{name} has {found} entries; expected {expected}")
    sizes = (plan.replicas, plan.microbatches, plan.microbatch_size)
    if plan.replicas * chunks > _MOST_RANKS or plan.microbatches * chunks > _MOST_FORWARDS:
        raise PlanError(
            f"replicas, microbatches and microbatch_size are {sizes} with {chunks} chunks; expected at most "
            f"{_MOST_RANKS} replicas x chunks, and at most {_MOST_FORWARDS} micro-batches x chunks"
        )
    if any(chunk >= chunks for chunk in plan.chunk_of):
        raise PlanError(f"chunk_of has an entry {max(plan.chunk_of)}; expected chunks below {chunks}")
    if any(chunk.stage != stage for chunk, stage in zip(plan.chunks, plan.placement)):
        raise PlanError("the stage of a chunk differs from placement; expected the same stages in both")
    if not plan.actions and plan.schedule not in SCHEDULES:
        raise PlanError(f"schedule {shortened(plan.schedule)} is not known: {did_you_mean(plan.schedule, SCHEDULES)}")
    schedule = plan.make_schedule() if plan.actions else plan.make_schedule(1)
    if schedule.placement != plan.placement:
        raise PlanError(
            f"placement is {list(plan.placement)!s:.80}; expected {list(schedule.placement)!s:.80}, as schedule "
            f"{shortened(plan.schedule)} places its chunks"
        )
    _ = plan.edges, plan.costs  # these check the chunks that traffic and ties name


def _first_microbatches(schedule: Schedule, count: int) -> Schedule:
    """Return a schedule with the first micro-batches only; the order of the others is kept, so it stays valid."""
    if count == schedule.microbatches:
        return schedule
    if count > schedule.microbatches:
        raise PlanError(
            f"schedule {schedule.name!r} is for {schedule.microbatches} micro-batches; expected no more, got {count}"
        )
    kept = tuple(tuple(action for action in actions if action.microbatch < count) for actions in schedule.actions)
    return Schedule(schedule.name, schedule.stages, count, schedule.placement, kept)
