"""The error for a problem that does not fit into memory: the stage, the missing bytes, and settings that would fit."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipepart.errors import PartitionError
from pipepart.partition.bottleneck import best_path
from pipepart.partition.device_orders import Place, device_orders
from pipepart.partition.linear_orders import LinearStates
from pipepart.partition.problem import Problem
from pipepart.partition.unit_costs import NEVER, Ints, UnitCosts, make_unit_costs
from pipepart.partition.units import UnitGraph

__all__ = ["nothing_fits"]

_SHIFT = 1 << 55
_WIDEST = 600


class _BytesOver(LinearStates):
    """Slices of the program order whose load is the bytes above the limit, shifted so that it is never negative."""

    def __init__(self, costs: UnitCosts) -> None:
        super().__init__(costs, range(costs.units))
        self.work = np.zeros(costs.units + 1, dtype=np.int64)

    def loads(
        self, sources: Ints, targets: Ints, place: Place, limit: int, *, traffic: bool = True
    ) -> tuple[Ints, Ints]:
        """Bytes above the limit of every slice, and no traffic."""
        costs, sums = self.costs, self.sums
        state = sums.state[targets][None, :] - sums.state[sources][:, None]
        saved = sums.saved[targets][None, :] - sums.saved[sources][:, None]
        needed = state + place.held * saved
        if costs.recomputes and place.held:
            again = state + saved + place.held * self.received(sources, targets, costs.received)
            needed = np.minimum(needed, again) if costs.keeps else again
        over = np.maximum(needed - min(place.limit, _SHIFT) + _SHIFT, 0)
        valid = sums.needed[targets][None, :] > sums.needed[sources][:, None]
        return np.where(valid, over, NEVER), np.zeros_like(over)


def nothing_fits(problem: Problem, graph: UnitGraph, chunks: int, microbatches: int) -> PartitionError:
    """The error for a problem without any cut that fits into memory."""
    least = _least_over(problem, graph, chunks, microbatches)
    if least is None or least[0] <= 0:
        # Memory suffices. Devices that cannot run some ops, or forced cuts, leave no partition.
        return PartitionError(
            f"partition: no cut into {chunks} chunks is possible on these devices: some ops cannot run on the devices "
            "that are left for them, or several chunks of a stage together do not fit; use other devices, fewer forced "
            "cuts, or more memory"
        )
    over, chunk, device = least
    room = problem.room(device)
    advice = _advice(problem, graph, chunks, microbatches)
    return PartitionError(
        f"partition: found no cut into {chunks} chunks that fits into memory: at best chunk {chunk} on "
        f"{problem.devices[device].name!r} needs {_size(room + over)}, "
        f"{_size(over)} more than its {_size(room)}; {advice}"
    )


def _advice(problem: Problem, graph: UnitGraph, chunks: int, microbatches: int) -> str:
    """Names those of recomputation, smaller micro-batches and more stages that would fit, tried on the program order."""
    options = []
    if "full" not in problem.recompute:
        full = dataclasses.replace(problem, recompute=(*problem.recompute, "full"))
        if _fits(full, graph, chunks, microbatches):
            options.append("recompute='full'")
    for part in (2, 4, 8, 16, 32):
        smaller = dataclasses.replace(
            problem, saved_bytes=problem.saved_bytes / part, output_bytes=problem.output_bytes / part
        )
        if _fits(smaller, graph, chunks, microbatches):
            options.append(f"micro-batches of 1/{part} of the size")
            break
    same = len(problem.devices) == 1 and len(problem.links) == 1 and problem.placement is None
    if same and isinstance(problem.in_flight, str) and not problem.split_at:
        for more in sorted({chunks + 1, chunks + 2, chunks + chunks // 2, 2 * chunks, 4 * chunks, 8 * chunks}):
            if chunks < more <= len(graph.members) and _fits(problem, graph, more, microbatches):
                options.append(f"{more} stages")
                break
    if options:
        return "this would fit: " + ", or ".join(options)
    return (
        "neither recomputation, nor micro-batches of 1/32 of the size, nor 8 times the stages would fit alone: "
        "use devices with more memory, or combine them"
    )


def _fits(problem: Problem, graph: UnitGraph, chunks: int, microbatches: int) -> bool:
    least = _least_over(problem, graph, chunks, microbatches)
    return least is not None and least[0] <= 0


def _least_over(problem: Problem, graph: UnitGraph, chunks: int, microbatches: int) -> tuple[int, int, int] | None:
    """Bytes above the limit, chunk and device, for the slices that need the least."""
    costs = make_unit_costs(problem, graph, chunks, require_work=False)
    devices = device_orders(problem, costs.slowness, chunks, microbatches)
    states = _BytesOver(costs)
    found = best_path(states, devices, NEVER - 1, widest=_WIDEST)
    if found is None:
        return None
    loads = [
        int(states.loads(np.array([a]), np.array([b]), place, NEVER)[0][0, 0])
        for a, b, place in zip(found.path, found.path[1:], found.places)
    ]
    worst = max(range(len(loads)), key=loads.__getitem__)
    return loads[worst] - _SHIFT, worst, found.places[worst].device


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size:.0f} bytes"
