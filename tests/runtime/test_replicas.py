"""Gradients over replicas: the mean, started while the last backward still runs, and once for accumulated steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.models import build
from support.ranks import run_ranks
from support.reference import assert_close, reference_step
from torch import nn

from pipepart.runtime.sync import ReplicaMean, buckets


def _accumulated(name: str, stages: int) -> int:
    from pipepart import Pipeline

    model = build(name)
    pipe = Pipeline(model, model.batch(8), stages=stages, microbatches=4)
    mine = dist.get_rank() // stages
    mesh = pipe.device_mesh
    assert mesh is not None and mesh.mesh_dim_names == ("replica", "stage")
    assert mesh.get_coordinate() == (mine, pipe.stage) and mesh["stage"].size() == stages
    batches = []
    for index in range(3 * 2):
        torch.manual_seed(60 + index)
        batches.append(model.batch(8))
    count = []
    original = dist.all_reduce

    def counting(*args, **kwargs):
        if kwargs.get("group") is not pipe._runtime.groups.numbers:  # what the losses are divided by
            count.append(1)
        return original(*args, **kwargs)

    dist.all_reduce = counting
    try:
        with pipe.accumulate():
            for step in range(2):
                pipe.step(*batches[2 * step + mine])
        assert not count, "a step inside accumulate() has reduced"
        assert all(p.grad is None for p in pipe.parameters())
        pipe.step(*batches[4 + mine])
    finally:
        dist.all_reduce = original
    plain = build(name)
    for batch in batches:
        reference_step(plain, batch, [2, 2, 2, 2])
    for key, parameter in pipe.named_parameters():
        assert_close(key, parameter.grad, dict(plain.named_parameters())[key].grad / 2)
    pipe.step(*batches[mine])  # and on top of what is there already
    for batch in batches[:2]:
        reference_step(plain, batch, [2, 2, 2, 2])
    for key, parameter in pipe.named_parameters():
        assert_close(key, parameter.grad, dict(plain.named_parameters())[key].grad / 2)
    return len(count)


@pytest.mark.slow
def test_accumulated_steps_are_reduced_once() -> None:
    assert all(count >= 1 for count in run_ranks(4, _accumulated, "gpt", 2))


class Branches(nn.Module):
    """Replicas take different branches: some parameters have a gradient on one of them only, one on none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.never = nn.Parameter(torch.ones(3))


def _different_branches() -> dict:
    model = Branches()
    mean = ReplicaMean(dist.group.WORLD, 2, {name: [0] for name, _ in model.named_parameters()}, set())
    parameters = dict(model.named_parameters())
    mean.begin(parameters)
    with mean.last_backward(0):
        (model.first if dist.get_rank() == 0 else model.last)(torch.ones(2, 4)).sum().backward()
    mean.chunk_is_final(0)
    mean.finish()
    return {name: p.grad for name, p in parameters.items()}


def test_replicas_that_take_different_branches() -> None:
    first, second = run_ranks(2, _different_branches)
    assert first["never"] is None
    assert second["never"] is None
    for name in ("first.weight", "last.weight"):
        assert torch.equal(first[name], torch.full((4, 4), 1.0))  # 2 samples on one replica: mean over two is 1
        assert torch.equal(first[name], second[name])


def _sent_during_backward() -> list[int]:
    """With small buckets: how many had set off when the backward of the first layer began."""
    buckets.MOST_BYTES = 200
    sizes = []
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    mean = ReplicaMean(dist.group.WORLD, 2, {name: [0] for name, _ in model.named_parameters()}, set())
    mean.begin(dict(model.named_parameters()))
    model[0].register_full_backward_pre_hook(lambda *args: sizes.append(mean._next))
    with mean.last_backward(0):
        model(torch.randn(3, 6)).sum().backward()
    mean.chunk_is_final(0)
    mean.finish()
    return sizes


def test_buckets_set_off_while_the_backward_runs() -> None:
    assert all(sizes[0] >= 2 for sizes in run_ranks(2, _sent_during_backward))
