"""Replicas that make updates of their own: equal to as many processes that train alone and exchange what the mode says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import GPT
from support.ranks import run_ranks
from support.reference import assert_close
from torch import nn

from pipepart import Pipeline
from pipepart.runtime.sync.replica_sums import summed

STEPS = 5
EVERY = 2
MODES: dict[str, Any] = {
    "mean": {"mode": "local", "every": EVERY},
    "two levels": {"inside": "mean", "size": 2, "between": "local", "every": EVERY},
    "nesterov": {"mode": "local", "every": EVERY, "outer": "nesterov", "outer_lr": 0.5, "outer_momentum": 0.8},
}


def _model() -> GPT:
    """A language model with a tied head, and positions that do not learn."""
    torch.manual_seed(0)
    model = GPT(depth=2).double()
    model.positions.weight.requires_grad_(False)
    return model


def _batches(replica: int) -> list[list[tuple[torch.Tensor, ...]]]:
    """The batches that a replica accumulates in each step; the replicas have different numbers of samples."""
    torch.manual_seed(10 + replica)
    return [[GPT.batch(4 + replica), GPT.batch(4)] for _ in range(STEPS)]


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _mean(models: list[GPT]) -> dict[str, torch.Tensor]:
    named = [dict(model.named_parameters()) for model in models]
    return {name: sum(each[name].detach() for each in named) / len(models) for name in named[0]}  # type: ignore[misc]


def _reference(
    mode: str, replicas: int
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor], list[list[float]]]:
    """The parameters of each replica, their mean, and the norms of the gradients of each replica.

    With two levels, a model stands for the two replicas of a group.
    """
    together = 2 if mode == "two levels" else 1
    models = [_model() for _ in range(replicas // together)]
    optimizers = [_optimizer(_trained(model)) for model in models]
    outer = _model()
    outer_optimizer = torch.optim.SGD(_trained(outer), lr=0.5, momentum=0.8, nesterov=True)
    batches, norms = [_batches(replica) for replica in range(replicas)], [[] for _ in models]
    if together > 1:
        pairs = list(zip(batches[::2], batches[1::2]))
        batches = [[first + second for first, second in zip(*pair)] for pair in pairs]
    for step in range(STEPS):
        for model, optimizer, own, seen in zip(models, optimizers, batches, norms):
            (2 * model(*(torch.cat(leaves) for leaves in zip(*own[step])))).backward()
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            mean = _mean(models)
            if mode == "nesterov":
                for name, parameter in outer.named_parameters():
                    parameter.grad = parameter.detach() - mean[name] if parameter.requires_grad else None
                outer_optimizer.step()
                mean = {name: p.detach() for name, p in outer.named_parameters()}
            for model in models:
                for name, parameter in model.named_parameters():
                    parameter.data.copy_(mean[name])
    ends = [{name: p.detach() for name, p in model.named_parameters()} for model in models]
    mean = _mean(models)
    return [end for end in ends for _ in range(together)], mean, [seen for seen in norms for _ in range(together)]


def _train(mode: str, stages: int, restart: bool) -> dict[str, Any]:
    """Train; with `restart` a second pipeline continues in the middle of a round with the states of the first."""
    replica = dist.get_rank() // stages
    cut: dict[str, Any] = {"schedule": "1f1b", "split_at": ["blocks.1"]} if stages > 1 else {}

    def begin() -> tuple[Pipeline, torch.optim.Optimizer]:
        made = Pipeline(_model(), GPT.batch(4), stages=stages, microbatches=2, sync=MODES[mode], **cut)
        return made, _optimizer([p for p in made.parameters() if p.requires_grad])

    pipe, optimizer = begin()
    norms = []
    for step, batches in enumerate(_batches(replica)):
        if restart and step == EVERY + 1:
            values = {name: p.detach().clone() for name, p in pipe.named_parameters()}
            states, sync = optimizer.state_dict(), pipe.sync_state_dict()
            pipe, optimizer = begin()
            with torch.no_grad():
                for name, parameter in pipe.named_parameters():
                    parameter.copy_(values[name])
            optimizer.load_state_dict(states)
            pipe.load_sync_state_dict(sync)
        pipe.steps(batches)
        norms.append(float(pipe.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    own = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    whole = pipe.state_dict()
    assert all(torch.equal(own[name], p) for name, p in pipe.named_parameters()), (
        "the parameters of this replica are back"
    )
    pipe.average_replicas()
    mean = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return {"own": own, "mean": mean, "whole": whole, "norms": norms, "updates": pipe.sync_state_dict()["updates"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "stages", "restart"),
    [("mean", 1, False), ("nesterov", 2, True), ("two levels", 1, False)],
    ids=["mean", "outer optimizer, restarted", "two levels"],
)
def test_rounds_equal_processes_that_train_alone_and_average(mode: str, stages: int, restart: bool) -> None:
    replicas = 4 if mode == "two levels" else 2
    ends, mean, norms = _reference(mode, replicas)
    for rank, found in enumerate(run_ranks(replicas * stages, _train, mode, stages, restart)):
        replica = rank // stages
        assert found["norms"] == pytest.approx(norms[replica], rel=1e-9)
        for name, values in found["own"].items():
            assert_close(f"rank {rank}: {name}", values, ends[replica][name])
            assert_close(f"rank {rank}, averaged: {name}", found["mean"][name], mean[name])
        for name, values in found["whole"].items():
            if name in mean:
                assert_close(f"in the state dict: {name}", values, mean[name])
        assert bool(found["whole"]) == (rank == 0)
        assert found["updates"] == {}


def _sums() -> list[torch.Tensor]:
    """The sums of one tensor over three replicas, on two stages where others stand around it."""
    torch.manual_seed(dist.get_rank())
    tied, others = torch.randn(1001), [torch.randn(300), torch.randn(2000)]
    stages = [[tied, *others], [others[1], tied]]
    return [dict(summed(tensors, dist.group.WORLD, {place}))[place] for place, tensors in enumerate(stages)]


@pytest.mark.slow
def test_copies_of_a_tied_parameter_stay_equal_on_their_stages() -> None:
    for first, second in run_ranks(3, _sums):
        assert torch.equal(first, second), "the order of additions must not depend on the other parameters of a stage"


def _alone() -> dict[str, torch.Tensor]:
    pipe = Pipeline(_model(), GPT.batch(4), microbatches=2, sync=MODES["nesterov"])
    optimizer = _optimizer([p for p in pipe.parameters() if p.requires_grad])
    for batches in _batches(0):
        pipe.steps(batches)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    pipe.average_replicas()
    return {name: p.detach() for name, p in pipe.named_parameters()}


def test_one_replica_is_plain_training() -> None:
    model = _model()
    optimizer = _optimizer(_trained(model))
    for own in _batches(0):
        (2 * model(*(torch.cat(leaves) for leaves in zip(*own)))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = _alone()
    for name, parameter in model.named_parameters():
        assert_close(name, found[name], parameter.detach())
