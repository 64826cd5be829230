"""A traced step: every action, message and reduction is there, on one clock."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from support.models import build
from support.ranks import run_ranks

from pipepart.errors import PlanError
from pipepart.runtime.tracing import TracePolicy


def _trace() -> tuple[Counter[str], bool, list[str]]:
    from pipepart import Pipeline

    model = build("gpt")  # tied: its gradients are summed over the stages
    pipe = Pipeline(model, model.batch(8), stages=2, microbatches=4, schedule="1f1b")
    with pytest.raises(PlanError, match=r"with pipe\.tracing\(\)"):
        _ = pipe.trace
    with pipe.tracing():
        for _ in range(2):
            pipe.step(*model.batch(8))
    timeline = pipe.trace
    pipe.step(*model.batch(8))
    assert pipe.trace == timeline  # a step outside is not timed
    by_action = {(event.stage, str(event.action)): event for event in timeline.events}
    wrong = []
    for event in timeline.events:
        action = event.action
        if event.end < event.start:
            wrong.append(f"{action} ends before it starts")
        if action.kind == "RECV":  # nothing arrives before it was sent
            sender = [e for (_, name), e in by_action.items() if name == str(action).replace("RECV", "SEND")]
            if len(sender) != 1 or sender[0].start > event.end:
                wrong.append(f"{action} has no send before it")
    return Counter(event.action.kind for event in timeline.events), timeline.step_time > 0, wrong


def test_actions_and_messages_of_all_stages() -> None:
    for counts, some_time, wrong in run_ranks(2, _trace):
        assert wrong == []
        assert some_time
        assert counts == {"F": 8, "B": 8, "SEND": 8, "RECV": 8, "REDUCE": 2}


def _offset() -> tuple[float, float]:
    from datetime import timedelta

    from pipepart.runtime.mesh import Groups, Mesh
    from pipepart.runtime.tracing import clock_offset

    groups = Groups.create(Mesh(1, 3), timedelta(seconds=60))
    shift = 1000.0 * groups.rank  # as if each host had been started at another time

    def clock() -> float:
        return time.perf_counter() + shift

    began = time.perf_counter()
    offset = clock_offset(groups, clock)
    return offset + shift, time.perf_counter() - began


def test_clocks_of_hosts_are_aligned() -> None:
    for error, all_rounds in run_ranks(3, _offset):
        assert abs(error) <= all_rounds  # the best round trip is no longer than all of them together


def test_a_mark_is_a_time() -> None:
    from pipepart.devices import Stopwatch

    watch = Stopwatch(torch.device("cpu"))
    first, second = watch.mark(), watch.mark()
    assert watch.seconds(first) <= watch.seconds(second) <= time.perf_counter()


def test_steps_are_traced_by_number_and_on_request() -> None:
    policy = TracePolicy()
    assert not policy.due(3)
    policy.numbers = frozenset({3, 10})
    asked = [False]
    end, other = policy.also(lambda: asked[0]), policy.also(lambda: asked[0])
    assert [number for number in range(12) if policy.due(number)] == [3, 10]
    asked[0] = True
    assert policy.due(4)
    end()
    assert policy.due(4)
    other()
    other()
    assert not policy.due(4)
    assert policy.due(10)
