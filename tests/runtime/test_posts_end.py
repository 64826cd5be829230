"""The posts and waits of the real executor, of all stages, end under the rules of NCCL.

Here is a part of the cases; `python -m tools.bench.channels` has all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.recorded_posts import Case, Recorded, grid, record_posts, with_host_waits

from pipepart.schedule import SCHEDULES, messages_of
from pipepart.schedule.channel_programs import channel_programs
from pipepart.schedule.channel_rules import RULES, Compute, Control, Entry, Order, Post, check_posts


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _thinned(stages: int) -> list[Case]:
    """Each schedule with one of its eight kinds of steps, another one for each schedule and number of stages."""
    cases = list(grid((stages,)))
    return [case for at, case in enumerate(cases) if (at + at // 8 + stages) % 8 == 0]


def test_every_schedule_and_every_kind_of_step_is_recorded() -> None:
    cases = [case for stages in (2, 3, 4, 8) for case in _thinned(stages)]
    assert {case.schedule for case in cases} == set(SCHEDULES) - {"forward"}, "evaluation is always 'forward'"
    assert {(c.stages, c.skips, c.uneven, c.training) for c in cases} == {
        (s, a, b, c) for s in (2, 3, 4, 8) for a in (False, True) for b in (False, True) for c in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_the_posts_of_every_schedule_end(stages: int) -> None:
    for case in _thinned(stages):
        recorded = record_posts(case, "planned")
        for programs in (recorded.programs, with_host_waits(recorded.programs)):
            for rule in RULES:
                found = check_posts(programs, rule)
                assert found is None, f"{case}: {found.describe()}"


def test_a_fixed_number_of_receives_ahead_hangs_with_one_queue() -> None:
    for case, ahead in [
        (Case("1f1b", 4, 6), 2),
        (Case("1f1b", 2, 6, options=(("slack", 4),)), 1),
        (Case("1f1b", 4, 6, skips=True), 1),
    ]:
        programs = record_posts(case, ahead).programs
        assert check_posts(programs, "eager") is None
        found = check_posts(programs, "one_queue")
        assert found is not None, f"{case}: {ahead} receives ahead"
        assert all(rank.device and rank.device.channel and rank.device.action for rank in found.ranks), found.describe()


def _of_schedule(recorded: Recorded, posting: int | str) -> list[list[Entry]]:
    """The programs that follow from the schedule alone."""
    schedule, routes, case = recorded.schedule, recorded.routes, recorded.case
    messages = messages_of(schedule, routes.forward, () if schedule.forward_only else routes.backward_pairs)
    tensors = {("F", *pair): len(edges) for pair, edges in routes.forward.items()}
    tensors |= {("B", b, a): len(edges) for (a, b), edges in routes.gradients.items()}
    forms = [int(case.uneven and k < case.microbatches // 2) for k in range(case.microbatches)]
    ahead = None if isinstance(posting, str) else posting
    return channel_programs(schedule, messages, ahead=ahead, tensors=tensors, forms=forms)


def _posts(programs: list[list[Entry]]) -> list[list[Entry]]:
    """Transfers, waits for them and compute, without the sizes of transfers."""
    return [
        [replace(e, size=0) if isinstance(e, Post) else e for e in program if isinstance(e, (Post, Order, Compute))]
        for program in programs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("posting", ["planned", 1, 2])
def test_the_programs_of_a_schedule_alone_are_those_of_the_executor(posting: int | str) -> None:
    verdicts = set()
    for case in [*_thinned(2), *_thinned(4)][:: 1 if posting == "planned" else 2]:
        recorded = record_posts(case, posting)
        expected = _of_schedule(recorded, posting)
        if posting == "planned":  # else the order among channels is that of a Python set
            assert _posts(list(map(list, recorded.programs))) == _posts(expected), case
        for rule in RULES:
            real, pure = (check_posts(with_host_waits(p), rule) for p in (recorded.programs, expected))
            assert (real is None) == (pure is None), f"{case}, {rule}"
            verdicts.add((rule, real is None))
    hangs = {("one_queue", False)} if posting != "planned" else set()
    assert verdicts >= {("lazy", True), ("eager", True)} | hangs


def test_a_second_step_waits_for_no_form() -> None:
    recorded = record_posts(Case("1f1b", 3, 5, skips=True, uneven=True), "planned")
    shared = 4  # the header and the result of two steps
    for stage, program in enumerate(recorded.programs):
        received = [entry for entry in program if isinstance(entry, Control) and entry.kind == "recv"]
        pairs = sum(target == stage for _, target in recorded.routes.forward)
        assert len(received) == 2 * 2 * pairs + shared - 2 * (stage in (0, 2)), "two numbers for each of two forms"
        assert all(entry.action for entry in program if isinstance(entry, Post) and entry.size > 1), "all are named"
