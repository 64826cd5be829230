"""A check of partitions that depends on the problem and the partition only, not on the search."""

from __future__ import annotations

import math

from pipepart.errors import PartitionError
from pipepart.partition.problem import Problem
from pipepart.partition.result import Partition

__all__ = ["check"]

_CLOSE = 1e-9


def check(problem: Problem, partition: Partition) -> None:
    """Raise `PartitionError` unless the partition is valid for the problem and its numbers are right."""
    chunk_of = partition.chunk_of
    chunks = len(partition.loads)
    if len(chunk_of) != problem.ops:
        raise PartitionError(f"partition: {len(chunk_of)} ops have a chunk; expected {problem.ops}")
    if sorted(set(chunk_of)) != list(range(chunks)):
        raise PartitionError(
            f"partition: the ops are in chunks {sorted(set(chunk_of))}; expected all of 0..{chunks - 1}"
        )
    for a, b in problem.edges:
        if chunk_of[a] > chunk_of[b]:
            raise PartitionError(
                f"partition: {problem.name(a)} in chunk {chunk_of[a]} feeds {problem.name(b)} in chunk {chunk_of[b]}; "
                "expected chunks that never decrease along an edge"
            )
    for group in problem.colocated:
        if len({chunk_of[op] for op in group}) > 1:
            raise PartitionError(
                f"partition: the colocated ops {group} are in chunks {[chunk_of[op] for op in group]}; expected one chunk"
            )
    for cut in problem.split_at:
        if max(chunk_of[:cut]) >= min(chunk_of[cut:]):
            raise PartitionError(f"partition: no cut lies before {problem.name(cut)}; split_at requires one there")
    _check_devices(problem, partition)
    _check_loads(problem, partition)
    _check_memory(problem, partition)


def _check_devices(problem: Problem, partition: Partition) -> None:
    chunks = len(partition.loads)
    if len(partition.devices) != chunks:
        raise PartitionError(f"partition: {len(partition.devices)} devices for {chunks} chunks; expected one per chunk")
    if problem.any_order:
        if len(set(partition.devices)) != chunks:
            raise PartitionError(f"partition: the devices are {partition.devices}; expected each device at most once")
    elif list(partition.devices) != [problem.device(chunk) for chunk in range(chunks)]:
        raise PartitionError(f"partition: the devices are {partition.devices}; expected those of the problem, in order")


def _check_loads(problem: Problem, partition: Partition) -> None:
    chunk_of = partition.chunk_of
    for chunk, load in enumerate(partition.loads):
        device = problem.devices[partition.devices[chunk]]
        forward, backward = problem.seconds(partition.devices[chunk])
        mine = [op for op in range(problem.ops) if chunk_of[op] == chunk]
        compute = sum(float(forward[op] + backward[op]) for op in mine)
        if partition.recompute[chunk] == "full":
            compute += sum(float(forward[op]) for op in mine)
        communication = 0.0
        for tensor in problem.traffic:
            where = [chunk_of[op] for op in tensor.ops]
            if chunk in where and any(other != chunk for other in where) and device.communicates:
                link = problem.link(chunk - 1 if min(where) < chunk else chunk)
                communication += link.seconds(tensor.size) + link.seconds(tensor.gradient)
        expected = max(compute, communication) if problem.overlap else compute + communication
        if not math.isclose(load, expected, rel_tol=_CLOSE, abs_tol=1e-15):
            raise PartitionError(f"partition: chunk {chunk} takes {expected} s, but its load is {load} s")
    if partition.bottleneck != max(partition.loads):
        raise PartitionError(f"partition: bottleneck {partition.bottleneck}; expected {max(partition.loads)}")
    if partition.lower_bound > partition.bottleneck * (1 + _CLOSE):
        raise PartitionError(
            f"partition: the bound is {partition.lower_bound}; expected at most the bottleneck, {partition.bottleneck}"
        )
    if partition.proved and partition.gap > 1e-6:
        raise PartitionError(f"partition: marked as proved to be optimal, but the gap is {partition.gap}; expected 0")


def _check_memory(problem: Problem, partition: Partition) -> None:
    chunks = len(partition.loads)
    held_by_stage: dict[int, float] = {}
    for chunk in range(chunks):
        mine = {op for op in range(problem.ops) if partition.chunk_of[op] == chunk}
        state = sum(float(problem.parameter_bytes[op]) for op in mine) * problem.state_factor
        saved = sum(float(problem.saved_bytes[op]) for op in mine)
        held = problem.held(chunk, chunks, partition.microbatches)
        used = state + held * saved
        if partition.recompute[chunk] == "full" and held:
            arriving = 0.0
            for tensor in problem.traffic:
                where = [partition.chunk_of[op] for op in tensor.ops]
                if chunk in where and min(where) < chunk:
                    arriving += tensor.size
            used = state + held * arriving + saved
        stage = problem.placement[chunk] if problem.placement is not None else chunk
        held_by_stage[stage] = held_by_stage.get(stage, 0.0) + used
        device = problem.devices[partition.devices[chunk]]
        if held_by_stage[stage] > (device.memory - problem.reserved_bytes) * (1 + _CLOSE):
            raise PartitionError(
                f"partition: stage {stage} on {device.name!r} holds {held_by_stage[stage] / 1e9:.3f} GB; "
                f"its limit is {(device.memory - problem.reserved_bytes) / 1e9:.3f} GB"
            )
