"""The simulator of the page against the one in Python."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from pipepart.report.page import SCRIPTS
from pipepart.report.timelines import flows, implied_receives
from pipepart.schedule import SCHEDULES, ChunkCosts, Edges, Timeline, make_schedule, simulate

ASSETS = Path(__file__).parents[2] / "pipepart" / "report" / "assets"
PURE = [name for name in SCRIPTS if name in ("schedules.js", "simulate.js", "greedy.js", "searched.js", "timeline.js")]

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def ask(cases: list[dict]) -> list[dict]:
    """What the page's simulator says about these cases."""
    command = ["node", str(Path(__file__).parent / "simulate_cases.js"), str(ASSETS), *PURE]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def random_case(number: int) -> tuple[dict, Timeline, list[list[str]]]:
    """A random schedule with random costs: skips, edges without gradient, contention, recompute, reductions, ties."""
    draw = random.Random(number)
    name = sorted(SCHEDULES)[number % len(SCHEDULES)]
    kind = SCHEDULES[name]
    stages, microbatches = draw.randint(1, 6), draw.randint(1, 13)
    chunks = kind.fixed_chunks or draw.randint(1, 3)
    slack = draw.randint(0, 3) if kind.takes_slack else 0
    total = stages * chunks
    pairs = {(c, c + 1) for c in range(total - 1)}
    pairs |= {(a, b) for a in range(total) for b in range(a + 2, total) if draw.random() < 0.15}
    back = {(a, b) for a, b in pairs if b == a + 1 or draw.random() < 0.6} if name != "forward" else set()
    several = sorted(draw.sample(range(total), min(total, 2)))

    def times(low: float = 0.2) -> tuple[float, ...]:
        return tuple(draw.uniform(low, 3.0) for _ in range(total))

    costs = ChunkCosts(
        forward=times(),
        backward_input=times(),
        backward_weight=times(),
        backward=times() if draw.random() < 0.5 else (),
        recompute=times(0.0) if draw.random() < 0.3 else (),
        activation=times(),
        kept_for_weight=draw.choice([0.0, 0.4, 1.0]),
        send_forward={pair: draw.choice([0.0, draw.uniform(0, 1)]) for pair in pairs},
        send_backward={pair: draw.uniform(0, 1) for pair in back},
        contention=draw.random() < 0.5,
        reduce=times() if draw.random() < 0.4 else (),
        reduce_tied=(draw.uniform(0, 2),) if draw.random() < 0.4 else (),
    )
    schedule = make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks, slack=slack, costs=costs)
    edges = Edges.of(total, pairs, back, [several] if len(several) > 1 else [])
    case = {
        "schedule": name,
        "options": {"stages": stages, "microbatches": microbatches, "chunks": chunks, "slack": slack},
        "costs": {
            **{key: getattr(costs, key) for key in ("forward", "backward_input", "backward_weight", "backward")},
            **{key: getattr(costs, key) for key in ("recompute", "activation", "kept_for_weight", "contention")},
            "send_forward": [[*pair, seconds] for pair, seconds in costs.send_forward.items()],
            "send_backward": [[*pair, seconds] for pair, seconds in costs.send_backward.items()],
            "reduce": costs.reduce,
            "reduce_tied": costs.reduce_tied,
        },
        "edges": {"forward": sorted(pairs), "backward": sorted(back), "tied": edges.tied},
    }
    lists = [[str(action) for action in mine] for mine in schedule.actions]
    return case, simulate(schedule, costs, edges), lists


@needs_node
def test_agrees_with_python_on_random_plans():
    cases = [random_case(number) for number in range(140)]
    answers = ask([case for case, _, _ in cases])
    for (case, timeline, lists), answer in zip(cases, answers, strict=True):
        assert answer["actions"] == lists, case["schedule"]
        expected = sorted((event.stage, str(event.action), event.start, event.end) for event in timeline.events)
        found = sorted(map(tuple, answer["events"]))
        assert [event[:2] for event in found] == [event[:2] for event in expected]
        for mine, other in zip(found, expected):
            assert mine[2:] == pytest.approx(other[2:], abs=1e-9, rel=0), mine
        received = [(e.stage, str(e.action)) for e in implied_receives(timeline)]
        assert sorted((stage, name) for stage, name, _, _ in answer["receives"]) == sorted(received)
        assert answer["flows"] == len(flows(timeline))
        assert answer["step"] == pytest.approx(timeline.step_time, abs=1e-9)
        assert answer["bubble"] == pytest.approx(timeline.bubble, abs=1e-9)
        assert answer["peaks"] == pytest.approx(list(timeline.peak_activations), abs=1e-9)
        path = [time for event in timeline.critical_path for time in (event.start, event.end)]
        assert [time for step in answer["critical"] for time in step] == pytest.approx(path, abs=1e-9)
        assert answer["shares"] == pytest.approx([timeline.step_time] * timeline.stages, abs=1e-9)


@needs_node
def test_large_plan_agrees():
    """16 stages x 64 micro-batches: the size that the page must stay quick with."""
    stages, microbatches = 16, 64
    draw = random.Random(5)
    costs = ChunkCosts(*(tuple(draw.uniform(1, 2) for _ in range(stages)) for _ in range(3)))
    schedule = make_schedule("1f1b", stages=stages, microbatches=microbatches, slack=3)
    case = {
        "schedule": "1f1b",
        "options": {"stages": stages, "microbatches": microbatches, "slack": 3},
        "costs": {key: getattr(costs, key) for key in ("forward", "backward_input", "backward_weight")},
        "edges": None,
    }
    (answer,) = ask([case])
    assert answer["step"] == pytest.approx(simulate(schedule, costs).step_time, abs=1e-9)
    assert len(answer["events"]) == 2 * stages * microbatches
    assert answer["flows"] == 2 * (stages - 1) * microbatches
