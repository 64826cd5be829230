"""Every schedule, on every shape that fits four processes, with and without recomputation: equal to one process.

That a pipeline plans for itself with each schedule is in `test_gradients`; here schedules with one chunk per stage share
a plan, so that it is measured once.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.models import build
from support.ranks import run_ranks
from support.reference import assert_close, reference_step

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")
RARER = ("v_half", "v_min", "dualpipe_v", "zb_1p", "zb_2p")
ONE_CHUNK = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_1p", "zb_2p")
V_SHAPED = ("zb_v", "v_half", "v_min", "dualpipe_v")
MODELS = ("gpt", "unet", "resnet", "mixed", "frozen")
CASES = [
    *((1, replicas, "gpt") for replicas in (1, 2)),
    *((stages, 1, name) for stages in (2, 3, 4) for name in MODELS),
    *((2, 2, name) for name in MODELS),
]  # stages, replicas, model
MICROBATCHES = 4


def _ways(name: str, stages: int) -> list[tuple[str, bool]]:
    """Schedules with and without recomputation; with several stages each model takes every schedule in one of the two.

    Of the five models, at least two take each schedule with recomputation, and at least two without. Each model takes
    one of the rarer schedules, another one at each number of stages.
    """
    if stages == 1:
        return [(schedule, recompute) for schedule in (*SCHEDULES, *RARER) for recompute in (False, True)]
    both = [(schedule, recompute) for schedule in SCHEDULES for recompute in (False, True)]
    rarer = RARER[(MODELS.index(name) + stages) % len(RARER)]
    return [way for way in both if (SCHEDULES.index(way[0]) + MODELS.index(name) + way[1]) % 2] + [
        (rarer, (MODELS.index(name) + stages // 2) % 2 == 0)
    ]


def _compare(name: str, stages: int, replicas: int, ways: list[tuple[str, bool]]) -> int:
    """Train one step in every way on this shape and compare with plain PyTorch, here on this rank."""
    from pipepart import Pipeline

    # Each replica has a batch of its own; their mean is what one process gets from all of them.
    plain, batches = build(name), []
    for replica in range(replicas):
        torch.manual_seed(40 + replica)
        batches.append(plain.batch(7))
    losses = [reference_step(plain, batch, [2, 2, 2, 1]) for batch in batches]
    expected = dict(plain.named_parameters())
    shape = {"stages": stages, "replicas": replicas, "microbatches": MICROBATCHES}
    compared, plans = 0, {}
    for schedule, recompute in ways:
        model = build(name)
        example = model.batch(8)
        kind = "one chunk" if schedule in ONE_CHUNK else "V" if schedule in V_SHAPED else schedule
        if kind in plans:
            again = (recompute,) * len(plans[kind].placement)
            plan = dataclasses.replace(plans[kind], schedule=schedule, slack=0, recompute=again)
            pipe = Pipeline(model, example, plan=plan)
        else:
            pipe = Pipeline(model, example, **shape, schedule=schedule, recompute=recompute)
            plans[kind] = pipe.plan
        assert pipe.plan.schedule == schedule
        assert pipe.plan.recomputes == (recompute,) * len(pipe.plan.placement)
        assert pipe.plan.chunks_per_stage == 1 or schedule not in ONE_CHUNK
        mine = pipe._runtime.groups.replica if pipe._runtime.groups is not None else 0
        loss = pipe.step(*batches[mine])
        assert_close(f"{schedule} loss", loss, losses[mine])
        for key, parameter in pipe.named_parameters():
            reference = expected[key].grad
            assert (parameter.grad is None) == (reference is None), f"{schedule} {key}"
            if reference is not None:
                assert_close(f"{schedule} recompute={recompute} {key}", parameter.grad, reference / replicas)
                compared += 1
        if replicas == 1:
            for key, buffer in plain.named_buffers():
                if pipe._runtime.ownership.buffers[key] == pipe.stage:
                    found = dict(model.named_buffers())[key]
                    assert_close(f"{schedule} recompute={recompute} buffer {key}", found, buffer)
    return compared


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "replicas", "name"), CASES)
def test_every_schedule_on_every_shape(stages: int, replicas: int, name: str) -> None:
    ways = _ways(name, stages)
    assert {schedule for schedule, _ in ways} >= set(SCHEDULES)
    assert {way for model in MODELS for way, _ in _ways(model, stages)} == {*SCHEDULES, *RARER}
    answers = run_ranks(stages * replicas, _compare, name, stages, replicas, ways)
    trainable = sum(p.requires_grad for p in build(name).parameters())
    assert sum(answers) >= trainable * len(ways) * replicas


def _dropping(stages: int) -> list[dict[str, torch.Tensor]]:
    from pipepart import Pipeline

    found, plan = [], None
    for _ in range(2):
        model = build("dropping")
        example = model.batch(8)
        pipe = (
            Pipeline(model, example, stages=stages, microbatches=4)
            if plan is None
            else Pipeline(model, example, plan=plan)
        )
        plan = dataclasses.replace(pipe.plan, recompute=(True,) * len(pipe.plan.placement))
        torch.manual_seed(3)
        pipe.step(*example)
        found.append({key: p.grad.clone() for key, p in pipe.named_parameters()})
    return found


def test_recomputation_draws_the_same_random_numbers() -> None:
    for kept, again in run_ranks(2, _dropping, 2):
        for key, gradient in kept.items():
            assert torch.equal(gradient, again[key]), key


def _from_file(path: str) -> list[str]:
    from pipepart import Pipeline

    model = build("gpt")
    pipe = Pipeline(model, model.batch(8), stages=2, schedule=path)
    plain = build("gpt")
    for size, sizes in ((8, [2, 2, 2, 2]), (3, [1, 1, 1])):  # the second: fewer samples than the file has micro-batches
        torch.manual_seed(size)
        batch = model.batch(size)
        plain.zero_grad()
        for parameter in pipe.parameters():
            parameter.grad = None
        assert_close("loss", pipe.step(*batch), reference_step(plain, batch, sizes))
        expected = dict(plain.named_parameters())
        for key, parameter in pipe.named_parameters():
            assert_close(key, parameter.grad, expected[key].grad)
    return [str(action) for action in pipe.plan.make_schedule().actions[0]]


@pytest.mark.slow
def test_a_schedule_written_by_hand_in_a_file(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0F2,0B0,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1F2,1B1,1B2,1F3,1B3\n")
    found = run_ranks(2, _from_file, str(path))[0]
    assert found == ["F0.0", "F0.1", "F0.2", "B0.0", "B0.1", "F0.3", "B0.2", "B0.3"]
