"""Properties of the partitioner beyond the optimum: determinism, errors, the checker, chunks, baselines, sizes."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pipepart.errors import PartitionError
from pipepart.partition import Device, Link, Partition, Problem, Tensor, baselines, check, partition


def chain(times: list[float], **more: object) -> Problem:
    n = len(times)
    return Problem(
        forward=np.array(times),
        backward=2 * np.array(times),
        parameter_bytes=np.full(n, 10.0),
        saved_bytes=np.full(n, 4.0),
        output_bytes=np.full(n, 8.0),
        edges=tuple((i, i + 1) for i in range(n - 1)),
        **more,  # type: ignore[arg-type]
    )


def blocks(count: int, branches: int, depth: int, seed: int = 0, **more: object) -> Problem:
    """Blocks of parallel branches with a residual, as in an inception network."""
    rng = np.random.default_rng(seed)
    edges: list[tuple[int, int]] = []
    start = 0
    for block in range(count):
        join = start + 1 + branches * depth
        if block:
            edges.append((start - 1, start))
        for branch in range(branches):
            ops = [start, *range(start + 1 + branch * depth, start + 1 + (branch + 1) * depth), join]
            edges.extend(pairwise(ops))
        edges.append((start, join))
        start = join + 1
    forward = rng.random(start) * (rng.random(start) > 0.3)
    return Problem(
        forward=forward,
        backward=2 * forward,
        parameter_bytes=rng.integers(0, 100, start).astype(float),
        saved_bytes=rng.integers(0, 100, start).astype(float),
        output_bytes=rng.integers(1, 100, start).astype(float),
        edges=tuple(sorted(edges)),
        links=(Link(1e3, 1e-4),),
        **more,  # type: ignore[arg-type]
    )


def test_known_optimum_of_a_chain() -> None:
    answer = partition(chain([3.0, 1.0, 1.0, 1.0, 2.0]), 2)
    assert answer.chunk_of == (0, 0, 1, 1, 1)
    assert answer.loads == (12.0, 12.0)
    assert answer.proved
    assert answer.gap == 0


def test_equal_bottlenecks_take_the_smaller_traffic() -> None:
    problem = dataclasses.replace(chain([4.0, 0.0, 0.0, 4.0]), output_bytes=np.array([90.0, 50.0, 10.0, 1.0]))
    assert partition(problem, 2).chunk_of == (0, 0, 0, 1)


def test_slack_trades_a_little_bottleneck_for_much_traffic() -> None:
    problem = dataclasses.replace(chain([4.0, 0.001, 4.0]), output_bytes=np.array([1.0, 1000.0, 1.0]))
    problem = dataclasses.replace(problem, forward=np.array([4.0, 0.002, 4.001]), backward=np.zeros(3))
    assert partition(problem, 2, slack=0.0).chunk_of == (0, 0, 1)
    cheaper = partition(problem, 2, slack=1e-3)
    assert cheaper.chunk_of == (0, 1, 1)
    assert 0 < cheaper.gap <= 1e-3
    assert not cheaper.proved


def test_a_skip_over_a_chunk_costs_that_chunk_nothing() -> None:
    problem = dataclasses.replace(
        chain([1.0, 1.0, 1.0], links=(Link(8.0),)), edges=((0, 1), (0, 2), (1, 2)), backward=np.zeros(3)
    )
    answer = partition(problem, 3)
    # Op 0 sends its tensor once, op 1 receives it and sends its own, op 2 receives both.
    assert answer.loads == (2.0, 3.0, 3.0)
    assert sum(answer.traffic) == 3 * 8.0


def test_given_tensors_replace_the_outputs() -> None:
    problem = chain([1.0, 1.0, 1.0, 1.0], links=(Link(1.0),), tensors=(Tensor((0, 1), 5.0), Tensor((2, 3), 5.0)))
    answer = partition(problem, 2)
    assert answer.chunk_of == (0, 0, 1, 1)
    assert answer.loads == (6.0, 6.0)


def test_more_chunks_than_units() -> None:
    problem = chain([1.0, 1.0, 1.0, 1.0], colocated=((0, 1),))
    with pytest.raises(PartitionError, match=r"4 chunks were requested, but .* cut into 3 at most .*3 or"):
        partition(problem, 4)
    with pytest.raises(PartitionError, match="into 3 at most"):
        baselines(problem, 4)


def test_colocation_across_a_chain_takes_what_lies_between() -> None:
    answer = partition(chain([1.0] * 6, colocated=((1, 3),)), 3)
    assert len({answer.chunk_of[op] for op in (1, 2, 3)}) == 1


def test_chunks_without_work_only_where_nothing_else_is_possible() -> None:
    problem = chain([1.0, 0.0, 0.0, 0.0])
    answer = partition(problem, 3)
    check(problem, answer)
    assert sorted(set(answer.chunk_of)) == [0, 1, 2]
    several = partition(chain([1.0, 0.0, 1.0, 0.0, 1.0]), 3)
    assert all(load > 0 for load in several.loads)


def test_forced_cuts() -> None:
    problem = chain([1.0] * 8, split_at=(2, 7))
    assert partition(problem, 3).chunk_of == (0, 0, 1, 1, 1, 1, 1, 2)
    four = partition(problem, 4)
    check(problem, four)
    with pytest.raises(PartitionError, match=r"split_at requires a cut before op 2, but op 1 before it and op 2"):
        partition(chain([1.0] * 4, split_at=(2,), colocated=((1, 2),)), 2)
    with pytest.raises(PartitionError, match="split_at 9"):
        chain([1.0] * 4, split_at=(9,))
    with pytest.raises(PartitionError, match="fewer forced cuts"):
        partition(problem, 2)


def test_memory_moves_the_cut_and_recompute_pays_for_it() -> None:
    free = chain([1.0] * 4)
    tight = dataclasses.replace(
        free, parameter_bytes=np.array([10.0, 10.0, 10.0, 100.0]), devices=(Device(memory=105),)
    )
    assert partition(free, 2).chunk_of == (0, 0, 1, 1)
    assert partition(tight, 2).chunk_of == (0, 0, 0, 1)
    saving = dataclasses.replace(
        free,
        saved_bytes=np.full(4, 12.0),
        devices=(Device(memory=80),),
        in_flight="gpipe",
        recompute=("none", "full"),
        backward=np.ones(4),
    )
    answer = partition(saving, 2, microbatches=4)
    check(saving, answer)
    assert answer.recompute == ("full", "full")
    assert answer.memory == (44.0, 76.0)
    assert answer.bottleneck == 6.0


def test_nothing_fits_says_what_would() -> None:
    problem = dataclasses.replace(
        chain([1.0] * 8), devices=(Device("card", memory=60),), in_flight="gpipe", state_factor=1.0
    )
    with pytest.raises(PartitionError) as caught:
        partition(problem, 2, microbatches=8)
    message = str(caught.value)
    assert "no cut into 2 chunks that fits into memory" in message
    assert "'card' needs 168 bytes, 108 bytes more than its 60 bytes" in message
    for option in ("micro-batches of 1/8 of the size", "8 stages"):
        assert option in message
    # What the message says is true: more stages, or smaller micro-batches.
    check(problem, partition(problem, 8, microbatches=8))
    smaller = dataclasses.replace(problem, saved_bytes=problem.saved_bytes / 8, output_bytes=problem.output_bytes / 8)
    check(smaller, partition(smaller, 2, microbatches=8))
    assert "recompute='full'" not in message
    with pytest.raises(PartitionError, match="recompute='full'"):
        partition(dataclasses.replace(problem, output_bytes=np.full(8, 0.5)), 2, microbatches=8)


def test_stages_with_several_chunks_share_their_memory() -> None:
    problem = chain([1.0] * 8, placement=(0, 1, 0, 1), devices=(Device(memory=40), Device(memory=40)))
    answer = partition(problem, 4)
    check(problem, answer)
    assert answer.devices == (0, 1, 0, 1)
    # The free optimum puts more on one stage than it can hold.
    heavy = dataclasses.replace(problem, parameter_bytes=np.array([18.0, 1, 1, 1, 18, 5, 1, 1]))
    answer = partition(heavy, 4)
    check(heavy, answer)
    assert answer.bottleneck > 2 * 3.0
    # 30 bytes in one op of the first chunk, 8 in one of the third: neither equal nor proportional parts would do.
    uneven = dataclasses.replace(problem, parameter_bytes=np.array([30.0, 0, 0, 0, 8, 4, 4, 0]))
    answer = partition(uneven, 4)
    check(uneven, answer)
    assert "the largest chunk first" in answer.method


def test_stages_with_several_chunks_are_balanced_as_a_whole() -> None:
    # The last op is larger than all else and sets the bottleneck. The cheapest cuts would give stage 1 another chunk
    # that is as large.
    problem = chain([*[1.0] * 12, 10.0], placement=(0, 1, 0, 1))
    problem = dataclasses.replace(problem, output_bytes=np.array([1.0, *[50.0] * 9, 1.0, 50.0, 50.0]))
    answer = partition(problem, 4)
    assert answer.bottleneck == 30.0
    assert max(answer.loads[0] + answer.loads[2], answer.loads[1] + answer.loads[3]) <= 42.0
    alone = partition(dataclasses.replace(problem, placement=None), 4)
    assert alone.loads[1] + alone.loads[3] == 60.0
    assert sum(alone.traffic) < sum(answer.traffic)


def test_fast_and_slow_devices() -> None:
    problem = chain([1.0] * 9, devices=(Device(speed=2.0), Device(speed=1.0)))
    assert partition(problem, 2).chunk_of.count(0) == 6
    pool = dataclasses.replace(problem, devices=(Device("slow"), Device("fast", speed=2.0)), any_order=True)
    assert partition(pool, 2).bottleneck == 9.0


def test_baselines_are_valid_and_never_better() -> None:
    problem = blocks(6, 2, 3)
    answer = partition(problem, 4, slack=0.0)
    others = baselines(problem, 4)
    assert sorted(others) == ["even", "flops", "greedy", "parameters"]
    for other in others.values():
        check(problem, other)
        assert other.bottleneck >= answer.bottleneck * (1 - 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_of": (1, 1, 0, 0)}, "feeds"),
        ({"chunk_of": (0, 0, 0, 0)}, "expected all of"),
        ({"loads": (6.0, 7.0), "bottleneck": 7.0}, "takes 6.0"),
        ({"lower_bound": 99.0}, "expected at most the bottleneck"),
        ({"devices": (0, 1)}, "expected those of the problem"),
    ],
)
def test_the_checker_finds_what_is_wrong(change: dict[str, object], message: str) -> None:
    problem = chain([1.0] * 4)
    good = partition(problem, 2)
    check(problem, good)
    with pytest.raises(PartitionError, match=message):
        check(problem, dataclasses.replace(good, **change))  # type: ignore[arg-type]


def test_the_checker_knows_groups_cuts_and_memory() -> None:
    good = partition(chain([1.0] * 4), 2)
    with pytest.raises(PartitionError, match="colocated"):
        check(chain([1.0] * 4, colocated=((1, 2),)), good)
    with pytest.raises(PartitionError, match="split_at requires one"):
        check(chain([1.0] * 4, split_at=(1,)), good)
    with pytest.raises(PartitionError, match="holds"):
        check(chain([1.0] * 4, devices=(Device(memory=15),)), good)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": ((2, 1),)}, "program order"),
        ({"forward": [1.0, math.nan, 1.0, 1.0]}, "finite"),
        ({"saved_bytes": [1.0]}, "saved_bytes has 1 entries"),
        ({"recompute": ("some",)}, "recompute"),
        ({"in_flight": "many"}, "in_flight"),
        ({"colocated": ((0, 7),)}, "outside"),
        ({"links": (Link(0.0),)}, "bandwidth"),
        ({"devices": (Device(speed=0.0),)}, "speed"),
    ],
)
def test_wrong_problems_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        dataclasses.replace(chain([1.0] * 4), **change)  # type: ignore[arg-type]


def test_numbers_for_another_chunk_count_are_named() -> None:
    with pytest.raises(PartitionError, match="3 devices for 2 stages"):
        partition(chain([1.0] * 4, devices=(Device(), Device(), Device())), 2)
    with pytest.raises(PartitionError, match="2 links for 2 chunks"):
        partition(chain([1.0] * 4, links=(Link(), Link())), 2)
    with pytest.raises(PartitionError, match="in_flight has 3"):
        partition(chain([1.0] * 4, in_flight=(1, 1, 1)), 2)


def test_large_graphs_have_a_small_gap_and_pass_the_checker() -> None:
    problem = blocks(50, 6, 4)
    answer = partition(problem, 16)
    check(problem, answer)
    assert not answer.method.startswith("exact")
    assert answer.gap < 0.05


@pytest.mark.slow
def test_same_answer_in_another_process_with_another_hash_seed() -> None:
    program = (
        f"import sys; sys.path[:0] = [r'{Path(__file__).parent}']\n"
        "from test_partition_answers import blocks\n"
        "from pipepart.partition import partition\n"
        "print(partition(blocks(12, 3, 3), 4).chunk_of, partition(blocks(40, 4, 5), 8).chunk_of)\n"
    )
    environment = {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    here = f"{partition(blocks(12, 3, 3), 4).chunk_of} {partition(blocks(40, 4, 5), 8).chunk_of}"
    assert run.stdout.strip() == here


def test_time_spent_is_no_part_of_equality() -> None:
    first, second = partition(blocks(4, 2, 2), 3), partition(blocks(4, 2, 2), 3)
    assert first.seconds != second.seconds
    assert first == second
    assert isinstance(first, Partition)
