"""What others do: the splits that a plan is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipepart.errors import PartitionError
from pipepart.partition.problem import Problem
from pipepart.partition.quotient import Quotient, quotient
from pipepart.partition.result import Partition, make_partition

__all__ = ["baselines"]


def baselines(problem: Problem, chunks: int, *, microbatches: int = 1) -> Mapping[str, Partition]:
    """Slices of the program order that know nothing of traffic or memory.

    ``even``: the same number of ops; ``parameters``: the same parameter bytes; ``flops``: the same forward time (the
    nearest thing to FLOPs among the costs); ``greedy``: fill a chunk up to the mean time, then start the next.
    """
    problem.fits_chunks(chunks)
    graph = quotient(problem)
    if len(graph.members) < chunks:
        raise PartitionError(
            f"partition: {chunks} stages were asked for, but the model can be cut into {len(graph.members)} at most: "
            f"ask for {len(graph.members)} or fewer"
        )
    weights = {
        "even": np.array([float(len(ops)) for ops in graph.members]),
        "parameters": _per_class(problem.parameter_bytes, graph),
        "flops": _per_class(problem.forward, graph),
    }
    found = {name: _proportional(weight, chunks) for name, weight in weights.items()}
    found["greedy"] = _greedy(_per_class(problem.forward + problem.backward, graph), chunks)
    return {name: _partition(problem, graph, cuts, chunks, microbatches, name) for name, cuts in found.items()}


def _per_class(values: Sequence[float] | np.ndarray, graph: Quotient) -> np.ndarray:
    return np.array([float(sum(values[op] for op in ops)) for ops in graph.members])


def _proportional(weight: np.ndarray, chunks: int) -> list[int]:
    """Cut where the running sum comes nearest to each multiple of the mean, with no empty chunk."""
    sums = np.concatenate(([0.0], np.cumsum(weight)))
    cuts = [0]
    for chunk in range(1, chunks):
        goal = sums[-1] * chunk / chunks
        first, last = cuts[-1] + 1, len(weight) - (chunks - chunk)
        cuts.append(first + int(np.argmin(np.abs(sums[first : last + 1] - goal))))
    return [*cuts, len(weight)]


def _greedy(weight: np.ndarray, chunks: int) -> list[int]:
    """Go on until the mean of what is left for the remaining chunks would be passed."""
    n = len(weight)
    cuts = [0]
    for chunk in range(chunks - 1):
        goal = float(weight[cuts[-1] :].sum()) / (chunks - chunk)
        end = cuts[-1] + 1
        filled = float(weight[cuts[-1]])
        while end < n - (chunks - chunk - 1) and filled + float(weight[end]) <= goal:
            filled += float(weight[end])
            end += 1
        cuts.append(end)
    return [*cuts, n]


def _partition(
    problem: Problem, graph: Quotient, cuts: Sequence[int], chunks: int, microbatches: int, name: str
) -> Partition:
    of_class = np.zeros(len(graph.members), dtype=int)
    for chunk in range(chunks):
        of_class[cuts[chunk] : cuts[chunk + 1]] = chunk
    devices = [chunk if problem.any_order else problem.device(chunk) for chunk in range(chunks)]
    return make_partition(
        problem,
        [int(of_class[graph.class_of[op]]) for op in range(problem.ops)],
        devices,
        microbatches=microbatches,
        lower_bound=0.0,
        method=name,
    )
