"""The search space of a request: every shape and schedule that it allows, with an estimate and a bound of the step.

The estimate assumes balanced stages and uses closed formulas; the bound holds for every split.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pipepart.cost import OpCosts
from pipepart.errors import PlanError
from pipepart.graph import OpGraph
from pipepart.planning.layout import Layout
from pipepart.planning.memory import ParameterSize
from pipepart.planning.pricing import Pricing
from pipepart.planning.request import (
    PER_STAGE,
    MicrobatchCount,
    PlanRequest,
    ScheduleChoice,
    Shape,
    even_count,
    schedule_choices,
)
from pipepart.planning.sources import Costs
from pipepart.planning.splits import Case
from pipepart.planning.sync_mode import SyncMode

__all__ = ["Candidate", "SearchSpace"]

_ONE_STAGE = (1, 2, 4, 8, 16, 32)
"""Numbers of micro-batches that are tried on one stage if memory is short."""
_HARDLY = 4
"""Factor of the estimate of a candidate that will probably not fit into memory: it comes last."""


@dataclass(frozen=True)
class Candidate:
    """One shape and one schedule."""

    shape: Shape
    choice: ScheduleChoice
    estimate: float
    """Seconds of a step by closed formulas, weighted so that meshes are comparable."""
    bound: float
    """Seconds that no split of this candidate can beat, weighted in the same way."""
    usual: bool = False
    """Whether the shape has the usual number of micro-batches."""

    @property
    def actions(self) -> int:
        return 2 * self.shape.stages * self.choice.chunks * self.shape.microbatches


@dataclass(frozen=True)
class _Bubble:
    """The bubble of balanced stages."""

    seconds: float
    held: float
    """Number of micro-batches whose activations the first stage holds."""


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """One graph with the costs of its ops, and the choices that a request leaves open."""

    graph: OpGraph
    source: Costs
    sizes: Mapping[str, ParameterSize]
    request: PlanRequest
    frozen: Collection[str] = ()

    def candidates(self) -> list[Candidate]:
        """Return all candidates that the request allows, the most promising first."""
        found = [
            candidate
            for stages, replicas in self._meshes()
            for count in self._counts(stages, replicas)
            for candidate in self._ways(Shape(stages, replicas, count.microbatches, count.size))
        ]
        return sorted(found, key=lambda c: (c.estimate, c.shape.stages, c.shape.microbatches))

    def case(self, shape: Shape) -> Case:
        if shape not in self._cases:
            layout = self.request.layout(shape.stages, shape.replicas)
            costs = self._costs(layout, shape.size)
            mode = SyncMode.of(self.request.sync)
            states = self.request.optimizer_factor * mode.optimizer_share(shape.replicas) + mode.copies(shape.replicas)
            share = mode.weight_share(shape.replicas)
            pricing = Pricing(self.graph, costs, self.sizes, layout, states, self.frozen, mode.sums_gradients, share)
            self._cases[shape] = Case(pricing, self.request, shape)
        return self._cases[shape]

    def nothing(self) -> PlanError:
        """Make the error for a request that allows no candidate."""
        request, devices = self.request, self.request.device_count
        if request.microbatches != "auto":
            return PlanError(
                f"a batch of {request.batch_size} cannot be split into {request.microbatches} micro-batches on any shape of "
                f"{devices} device(s): use fewer micro-batches or a larger batch"
            )
        room = max(request.device_memory())
        return PlanError(
            f"the model does not fit on {devices} device(s) of {room / 1e9:.2f} GB: weights, gradients and optimizer state "
            f"are {self._state / 1e9:.2f} GB, {self._state / devices / 1e9:.2f} GB a stage with all devices in one "
            f"pipeline. The model fits on more stages: use devices={math.ceil(self._state / room)} or more."
        )

    @cached_property
    def _cases(self) -> dict[Shape, Case]:
        return {}

    @cached_property
    def _parameters(self) -> int:
        """Bytes of all parameters."""
        return sum(size.bytes for size in self.sizes.values())

    @property
    def _state(self) -> float:
        """Bytes of all parameters with their gradients and optimizer state."""
        return self._parameters * (2 + self.request.optimizer_factor)

    def _costs(self, layout: Layout, size: int) -> tuple[OpCosts, ...]:
        kinds = layout.kinds or ("",)
        found = tuple(self.source.at(size, kind) for kind in (kinds if len(set(kinds)) > 1 else kinds[:1]))
        names = tuple(op.name for op in self.graph.ops)
        if any(costs.names != names for costs in found):
            raise PlanError("the costs belong to another graph: their ops have other names. Measure the costs again.")
        return found

    def _meshes(self) -> Iterator[tuple[int, int]]:
        request, devices = self.request, self.request.device_count
        if request.stages != "auto" and request.replicas != "auto":
            yield int(request.stages), int(request.replicas)
        elif request.stages != "auto":
            yield int(request.stages), _divided(devices, int(request.stages), "stages")
        elif request.replicas != "auto":
            yield _divided(devices, int(request.replicas), "replicas"), int(request.replicas)
        else:
            for stages in range(1, min(devices, max(len(self.graph.ops), 1)) + 1):  # a chunk has at least one op
                few = request.each_replica or devices // stages <= request.batch_size
                if devices % stages == 0 and (stages == 1 or few):
                    yield stages, devices // stages

    def _counts(self, stages: int, replicas: int) -> list[MicrobatchCount]:
        """The numbers of micro-batches for a replica's share of the batch."""
        request = self.request
        if request.counts:
            return list(request.counts)
        share = request.share(replicas)
        if request.microbatches != "auto":
            count = int(request.microbatches)
            return [MicrobatchCount(count, -(-share // count))] if count <= share else []
        if stages > 1:
            counts = tuple(stages * each for each in PER_STAGE)
        else:
            counts = _ONE_STAGE if request.memory_limit is not None or self._tight(share) else (1,)
        return sorted({even_count(share, count) for count in counts}, key=lambda found: found.microbatches)

    def _tight(self, share: int) -> bool:
        """Return whether the whole model with the whole share could be too large for a device."""
        if self.request.cluster is None:
            return False
        costs = self.source.at(share, self.request.cluster.devices[0].name)
        return self._state + sum(costs.saved_bytes) > min(self.request.device_memory())

    def _ways(self, shape: Shape) -> Iterator[Candidate]:
        case, request = self.case(shape), self.request
        stages, microbatches, layout = shape.stages, shape.microbatches, case.pricing.layout
        costs = case.pricing.costs
        f, i, w = (
            min(math.fsum(getattr(one, name)) for one in costs) / stages
            for name in ("forward", "backward_input", "backward_weight")
        )
        state = self._state / stages
        saved = math.fsum(costs[0].saved_bytes) / stages
        room = max(layout.memory)
        if state > room and request.stages == "auto":
            return  # not even the parameters fit
        reduce = layout.reduce_seconds(0, self._parameters / stages)
        weight = request.weight(shape.replicas)
        usual = bool(request.counts) and request.counts[0] == MicrobatchCount(microbatches, shape.size)
        for choice in schedule_choices(request, stages):
            full = state + _bubble(choice, stages, microbatches, f, i, w).held * saved > room
            again = request.recompute is True or (request.recompute == "auto" and full)
            back = i + f if again else i  # recomputation precedes the gradient of the inputs
            bubble = _bubble(choice, stages, microbatches, f, back, w).seconds
            estimate = microbatches * (f + back + w) + bubble + reduce
            if full and not again:
                estimate *= _HARDLY
            bound = case.pricing.least_work.step_bound(stages, microbatches, choice.chunks)
            yield Candidate(shape, choice, estimate * weight, bound * weight, usual)


def _bubble(choice: ScheduleChoice, p: int, m: int, f: float, i: float, w: float) -> _Bubble:
    gap, v = p - 1, choice.chunks
    whole = gap * (f + i + w)
    kinds = {
        "gpipe": _Bubble(whole / v, float(m)),
        "1f1b": _Bubble(whole, float(min(m, p + choice.slack))),
        "interleaved": _Bubble(whole / v, min(float(m), p + gap / v)),
        "zb_h1": _Bubble(gap * max(f + i - w, 0.0), float(min(m, p))),
        "zb_h2": _Bubble(gap * max(f + i - 2 * w, 0.0), float(min(m, 2 * p - 1))),
        "zb_v": _Bubble(gap * f / 2, float(min(m, p))),
        "v_half": _Bubble(0.6 * whole, min(float(m), p / 2 + 1.5)),
        "v_min": _Bubble(2 * whole / 3, min(float(m), p / 3 + 4 / 3)),
        "dualpipe_v": _Bubble(gap * f / 2, min(float(m), p + 0.5)),
        "zb_1p": _Bubble(gap * max(f + i - w, 0.0), float(min(m, p))),
        "zb_2p": _Bubble(gap * f, float(min(m, 2 * p))),
    }
    return kinds.get(
        choice.schedule, kinds["1f1b"]
    )  # schedules from files have no formula: that of 1f1b stands for them


def _divided(devices: int, by: int, name: str) -> int:
    if devices % by:
        raise PlanError(
            f"devices must be a multiple of {name} (devices = replicas x stages): got devices={devices}, {name}={by}. "
            f"Use devices={-(-devices // by) * by}, or another number of {name}."
        )
    return devices // by
