"""The lists that torch.distributed.pipelining generates: which of them are right, and how ours compare."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from pipepart.errors import ScheduleError
from pipepart.schedule import (
    SCHEDULES,
    ChunkCosts,
    from_csv,
    make_schedule,
    messages_of,
    peak_activations,
    read_program,
    simulate,
    step_time,
    validate,
    validate_program,
    write_csv,
    write_program,
)
from pipepart.schedule.validate import compute_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench.schedules.peers import TORCH_SCHEDULES, _stage, torch_lists, torch_schedule

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 5, 6, 8, 12)]
MORE = [(p, m) for p in (2, 4, 5, 8, 12) for m in (3, 7, 9, 10, 16, 24, 40)]
RATIOS = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 2.0, 1.0), (2.0, 1.0, 1.0)]


@pytest.mark.parametrize("name", [name for name in TORCH_SCHEDULES if name != "Schedule1F1B"])
def test_torch_schedules_pass_the_validator_with_their_messages(name, tmp_path):
    """All but 1F1B (see below), wherever torch itself takes the numbers."""
    proved = 0
    messages = name != "ScheduleGPipe"  # its lists have no messages
    for v in TORCH_SCHEDULES[name]:
        for p, m in SIZES:
            try:
                text = torch_lists(name, p, m, v, messages=messages)
            except ValueError:
                continue  # refused by torch: numbers that do not divide, or too few micro-batches
            path = tmp_path / "lists.csv"
            path.write_text(text)
            lists = read_program(path)
            if messages:
                validate_program(lists, microbatches=m, name=name)
            else:
                validate(compute_of(lists, name, m))
            proved += 1
    assert proved >= 18


def test_the_1f1b_list_of_torch_is_wrong_on_its_last_rank(tmp_path):
    """It counts the forwards of the last rank from 1: micro-batch 0 is missing, and one that does not exist is there.

    Torch shows this list, its 1F1B runs without it. With the last rank counted from 0 the list is right.
    """
    path = tmp_path / "lists.csv"
    for p, m in ((2, 4), (4, 8), (8, 16)):
        text = torch_lists("Schedule1F1B", p, m, 1)
        path.write_text(text)
        with pytest.raises(ScheduleError, match=rf"stage {p - 1} has F{p - 1}\.{m}; expected"):
            validate(compute_of(read_program(path), "Schedule1F1B", m))
        for k in range(1, m + 1):
            text = text.replace(f"{p - 1}F{k},", f"{p - 1}F{k - 1},")
        repaired = from_csv(text, "repaired")
        assert repaired.actions == make_schedule("1f1b", stages=p, microbatches=m).actions


PAIRS = [("ScheduleInterleaved1F1B", "interleaved"), ("ScheduleZBVZeroBubble", "zb_v")]


@cache
def mine_and_other(theirs, ours, p, m, v):
    """Our schedule and that of torch, or None where torch refuses the numbers; made once for all ratios."""
    try:
        other = torch_schedule(theirs, p, m, v)
    except ValueError:
        return None
    return make_schedule(ours, stages=p, microbatches=m, chunks=v), other


def compare_with_torch(theirs, ours, ratio, sizes):
    compared = 0
    for v in TORCH_SCHEDULES[theirs]:
        for p, m in sizes:
            both = mine_and_other(theirs, ours, p, m, v)
            if both is None:
                continue
            mine, other = both
            costs = ChunkCosts.even(p, v, forward=ratio[0], backward_input=ratio[1], backward_weight=ratio[2])
            assert step_time(mine, costs) <= step_time(other, costs) + 1e-9, (p, m, v)
            assert max(peak_activations(mine)) <= max(peak_activations(other)), (p, m, v)
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize(("theirs", "ours"), PAIRS[1:])  # both, and more sizes, below
def test_ours_are_not_slower_and_need_no_more_memory(theirs, ours):
    compare_with_torch(theirs, ours, RATIOS[0], SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_ours_are_not_slower_for_other_sizes_and_ratios(theirs, ours, ratio):
    compare_with_torch(theirs, ours, ratio, SIZES + MORE)


def test_published_bubble_of_the_interleaved_zero_bubble_list():
    timeline = simulate(torch_schedule("ScheduleInterleavedZeroBubble", 4, 8, 2), ChunkCosts.even(4, 2))
    assert timeline.bubble == pytest.approx(0.0588, abs=5e-5)


def test_zb_v_is_shorter_than_torchs_with_few_microbatches():
    costs = ChunkCosts.even(8, 2)
    mine = simulate(make_schedule("zb_v", stages=8, microbatches=8), costs).step_time
    assert (mine, simulate(torch_schedule("ScheduleZBVZeroBubble", 8, 8, 2), costs).step_time) == (27.5, 31.0)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward"])
def test_torch_loads_our_files(name, tmp_path):
    """Torch reads our lists with and without messages; its simulation comes to the end, and we prove its messages."""
    p, m = 4, 8
    schedule = make_schedule(name, stages=p, microbatches=m)
    path = tmp_path / "ours.csv"
    write_csv(schedule, path)
    held = schedule.chunks_of(0)
    runtime = torch_schedules._PipelineScheduleRuntime([_stage(c, schedule.chunks, p) for c in held], m)
    runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    lowered = runtime.pipeline_order_with_comms
    path.write_text("".join(",".join(map(str, lowered[rank])) + "\n" for rank in range(p)))
    assert validate_program(read_program(path), microbatches=m).schedule.actions == schedule.actions
    write_program(messages_of(schedule).program, path)
    runtime._load_csv(str(path), format="compute_comms")
    assert runtime._simulate()
