"""The partitioner: reductions, then an exact search where it can be afforded, and a bound always."""

from __future__ import annotations

import math
import time

from pipepart.errors import PartitionError
from pipepart.partition.instance import NEVER, Instance, make_instance
from pipepart.partition.linear import LinearStates
from pipepart.partition.problem import Problem
from pipepart.partition.quotient import Quotient, quotient
from pipepart.partition.result import Partition, make_partition
from pipepart.partition.route import Route, make_route
from pipepart.partition.search import Found, States, best_path

__all__ = ["partition"]

_GROWTH = (1.01, 1.03, 1.08, 1.2, 1.5, 2.0, 4.0)
_WIDEST = 1500


def partition(problem: Problem, chunks: int, *, microbatches: int = 1, slack: float = 1e-3) -> Partition:
    """Cut a model into chunks with the smallest bottleneck; among (nearly) equal ones the one with less traffic.

    ``slack``: by how much (relative) the bottleneck may be worse if that lowers the traffic.
    """
    started = time.perf_counter()
    if chunks < 1 or microbatches < 1:
        raise PartitionError(f"partition: {chunks} chunks and {microbatches} micro-batches; expected at least 1 each")
    problem.fits_chunks(chunks)
    graph = quotient(problem)
    if len(graph.members) < chunks and not problem.fewer:
        raise PartitionError(
            f"partition: {chunks} stages were asked for, but the model can be cut into {len(graph.members)} at most"
            f"{' (some ops must stay together)' if problem.colocated else ''}: ask for {len(graph.members)} or fewer"
        )
    instance = make_instance(problem, graph, chunks)
    if int(instance.counts.sum()) < chunks and not problem.fewer:
        instance = make_instance(problem, graph, chunks, require_work=False)
    route = make_route(problem, instance, chunks, microbatches)
    bound = work_bound(instance, route)
    states = LinearStates(instance, range(instance.classes))
    found = smallest(states, route, bound)
    if found is None:
        raise PartitionError(f"partition: no cut into {chunks} chunks fits into memory")
    return _answer(problem, graph, states, found, bound / instance.scale, microbatches, started)


def work_bound(instance: Instance, route: Route) -> int:
    """No bottleneck is below the work over the devices, or below the largest class."""
    total = int(instance.least.sum())
    spread = math.floor(total / route.nodes[0].left * (1 - 1e-12))
    return max(spread, int(instance.least.max()), 1)


def smallest(states: States, route: Route, bound: int) -> Found | None:
    """The best path over the states, found under growing limits so that the windows stay small."""
    for factor in _GROWTH:
        found = best_path(states, route, int(bound * factor) + 1, widest=_WIDEST)
        if found is not None:
            return found
    return best_path(states, route, NEVER - 1, widest=_WIDEST)


def _answer(
    problem: Problem,
    graph: Quotient,
    states: LinearStates,
    found: Found,
    bound: float,
    microbatches: int,
    started: float,
) -> Partition:
    chunk_of_class = [0] * len(graph.members)
    for chunk, (source, target) in enumerate(zip(found.path, found.path[1:])):
        for member in states.order[source:target]:
            chunk_of_class[member] = chunk
    return make_partition(
        problem,
        [chunk_of_class[graph.class_of[op]] for op in range(problem.ops)],
        [position.device for position in found.positions],
        microbatches=microbatches,
        lower_bound=bound,
        method="slices of the program order",
        seconds=time.perf_counter() - started,
    )
