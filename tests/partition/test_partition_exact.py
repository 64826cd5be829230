"""The search against brute force on small random problems, and the checker on everything it answers."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipepart.errors import PartitionError
from pipepart.partition import Problem, check, partition

sys.path.insert(0, str(Path(__file__).parent))
from brute_force import optimum, random_problem, with_memory, with_two_kinds

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)
SEEDS = st.integers(0, 10**6)


def agrees(problem: Problem, chunks: int, microbatches: int = 1) -> None:
    best = optimum(problem, chunks, microbatches)
    if math.isinf(best):
        try:
            answer = partition(problem, chunks, microbatches=microbatches, slack=0.0)
        except PartitionError:
            return
        # Only with an idle chunk, which is taken where work does not suffice for all of them.
        work = problem.forward + problem.backward
        idle = [c for c in range(answer.chunks) if not any(work[op] > 0 for op in answer.ops_of(c))]
        assert idle, "brute force finds no partition at all"
        return
    answer = partition(problem, chunks, microbatches=microbatches, slack=0.0)
    check(problem, answer)
    assert answer.proved
    assert answer.bottleneck == pytest.approx(best, rel=1e-9)
    assert answer.lower_bound <= best * (1 + 1e-9)


@SETTINGS
@given(seed=SEEDS, ops=st.integers(2, 8), chunks=st.integers(1, 4))
def test_equals_brute_force_with_skips_and_groups(seed: int, ops: int, chunks: int) -> None:
    agrees(random_problem(seed, ops), min(chunks, ops))


@SETTINGS
@given(seed=SEEDS, ops=st.integers(2, 8), chunks=st.integers(1, 4), microbatches=st.integers(1, 6))
def test_equals_brute_force_with_memory_and_recompute(seed: int, ops: int, chunks: int, microbatches: int) -> None:
    problem = with_memory(random_problem(seed, ops), seed, chunks)
    agrees(problem, min(chunks, ops), microbatches)


@SETTINGS
@given(seed=SEEDS, ops=st.integers(3, 7), chunks=st.integers(1, 3))
def test_equals_brute_force_with_two_device_kinds(seed: int, ops: int, chunks: int) -> None:
    chunks = min(chunks, ops)
    agrees(with_two_kinds(random_problem(seed, ops), seed, chunks), chunks)


@SETTINGS
@given(seed=SEEDS, ops=st.integers(3, 7), chunks=st.integers(2, 4), fewer=st.booleans())
def test_equals_brute_force_with_forced_cuts(seed: int, ops: int, chunks: int, fewer: bool) -> None:
    problem = dataclasses.replace(
        random_problem(seed, ops), split_at=(1 + seed % (ops - 1),), colocated=(), fewer=fewer
    )
    agrees(problem, min(chunks, ops))


@SETTINGS
@given(seed=SEEDS, ops=st.integers(3, 8), chunks=st.integers(2, 3))
def test_least_traffic_among_equal_bottlenecks(seed: int, ops: int, chunks: int) -> None:
    problem = dataclasses.replace(random_problem(seed, ops), overlap=True, colocated=())
    best = optimum(problem, chunks)
    if math.isinf(best):
        return
    answer = partition(problem, chunks, slack=0.0)
    from brute_force import assignments, load_of

    least = math.inf
    for chunk_of in assignments(problem, chunks):
        if len(set(chunk_of)) == chunks:
            loads = [load_of(problem, chunk_of, c, chunks, 0, 0) for c in range(chunks)]
            if max(loads) <= best * (1 + 1e-10):
                least = min(least, received_bytes(problem, chunk_of))
    assert sum(answer.traffic) == pytest.approx(least)


def received_bytes(problem: Problem, chunk_of: tuple[int, ...]) -> float:
    total = 0.0
    ways = 2 if problem.backward.sum() > 0 else 1
    for source in range(problem.ops):
        targets = {chunk_of[b] for a, b in problem.edges if a == source} - {chunk_of[source]}
        total += ways * len(targets) * problem.output_bytes[source]
    return total
