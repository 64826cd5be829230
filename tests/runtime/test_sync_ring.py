"""The mode `ring`: no update is lost or counted twice, whoever is slow, and none is made with parameters that are too old."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import GPT
from support.ranks import run_ranks
from support.reference import assert_close
from torch import nn

from pipepart import Pipeline

STEPS = 8
"""So many that a replica makes all updates that it may make without the token in the first half, and waits for it."""
SLOW = 0.1
"""Seconds that the slow replica sleeps in each step."""


def _model() -> GPT:
    """A language model with a tied head."""
    torch.manual_seed(0)
    return GPT(depth=2).double()


class _Updates:
    """The sum of all updates of an optimizer, as it has made them itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> None:
        self.named, self.before = named, dict[str, torch.Tensor]()
        self.sums = {name: torch.zeros_like(p) for name, p in named.items()}
        optimizer.register_step_pre_hook(self.begin)
        optimizer.register_step_post_hook(self.end)

    def begin(self, *args: Any) -> None:
        self.before = {name: p.detach().clone() for name, p in self.named.items()}

    def end(self, *args: Any) -> None:
        for name, parameter in self.named.items():
            self.sums[name] += parameter.detach() - self.before[name]


def _train(stages: int, staleness: int, slow: int, twice: bool) -> dict[str, Any]:
    """Train; with `twice`, the ring settles in the middle, as for a checkpoint."""
    replica = dist.get_rank() // stages
    cut: dict[str, Any] = {"schedule": "1f1b", "split_at": ["blocks.1"]} if stages > 1 else {}
    sync = {"mode": "ring", "staleness": staleness}
    pipe = Pipeline(_model(), GPT.batch(4), stages=stages, microbatches=2, sync=sync, **cut)
    named = dict(pipe.named_parameters())
    begin = {name: p.detach().clone() for name, p in named.items()}
    optimizer = torch.optim.SGD(named.values(), lr=0.05, momentum=0.9)
    updates, norms = _Updates(optimizer, named), []
    torch.manual_seed(10 + replica)
    for step in range(STEPS):
        if replica == slow:
            time.sleep(SLOW)
        if twice and step == STEPS // 2:
            pipe.state_dict()
        if twice and step == STEPS - 2:
            pipe.evaluate(*GPT.batch(4))
        pipe.step(*GPT.batch(4))
        norms.append(float(pipe.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    before = {name: p.detach().clone() for name, p in named.items()}
    pipe.average_replicas()
    pipe.average_replicas()
    end = {name: p.detach().clone() for name, p in named.items()}
    return {"begin": begin, "sums": updates.sums, "before": before, "end": end, "seen": dict(pipe.staleness)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "replicas", "staleness", "slow", "twice"),
    [(1, 2, 1, 1, False), (2, 2, 2, 0, True), (1, 3, 1, 2, True)],
    ids=["slow second", "two stages", "three replicas"],
)
def test_every_update_is_added_once_and_none_is_too_old(
    stages: int, replicas: int, staleness: int, slow: int, twice: bool
) -> None:
    found = run_ranks(stages * replicas, _train, stages, staleness, slow, twice)
    for rank, result in enumerate(found):
        copies = found[rank % stages :: stages]
        for name, begin in result["begin"].items():
            expected = begin + sum(other["sums"][name] for other in copies) / replicas
            assert_close(f"rank {rank}: {name}", result["end"][name], expected)
            assert torch.equal(result["end"][name], copies[0]["end"][name]), f"{name} differs between replicas"
        assert result["seen"], "the token has come"
        assert max(result["seen"]) <= staleness * replicas
    for stage_of in range(replicas):  # copies of the tied head stay equal on both stages
        held = [found[stage_of * stages + stage]["before"] for stage in range(stages)]
        for name in set.intersection(*map(set, held)):
            assert all(torch.equal(held[0][name], other[name]) for other in held)


def _half_frozen() -> dict[str, Any]:
    replica, model = dist.get_rank() // 2, _model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("blocks.1"))
    cut: dict[str, Any] = {"schedule": "1f1b", "split_at": ["blocks.1"]}
    pipe = Pipeline(model, GPT.batch(4), stages=2, microbatches=2, sync="ring", timeout=60, **cut)
    named = dict(pipe.named_parameters())
    begin = {name: p.detach().clone() for name, p in named.items()}
    optimizer = torch.optim.SGD(named.values(), lr=0.05)
    probe = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    updates = _Updates(optimizer, named)
    torch.manual_seed(10 + replica)
    for _ in range(4):
        pipe.step(*GPT.batch(4))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            probe.step()  # of something else, which no other rank has
    pipe.average_replicas()
    end = {name: p.detach().clone() for name, p in named.items()}
    return {"begin": begin, "sums": updates.sums, "end": end, "seen": dict(pipe.staleness)}


@pytest.mark.slow
def test_a_stage_that_trains_nothing_goes_with_the_others() -> None:
    found = run_ranks(4, _half_frozen, timeout=150)
    for rank, result in enumerate(found):
        assert result["seen"], "the token has come"
        for name, begin in result["begin"].items():
            expected = begin + sum(other["sums"][name] for other in found[rank % 2 :: 2]) / 2
            assert_close(f"rank {rank}: {name}", result["end"][name], expected)
            assert name.startswith("blocks.1") or torch.equal(expected, begin)


def test_one_replica_is_plain_training() -> None:
    model, batches = _model(), [GPT.batch(4) for _ in range(3)]
    pipe = Pipeline(_model(), GPT.batch(4), microbatches=2, sync="ring")
    for trained, step in ((model, model), (pipe, pipe.step)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)  # type: ignore[attr-defined]
        for batch in batches:
            loss = step(*batch)
            if trained is model:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), (_, other) in zip(pipe.named_parameters(), model.named_parameters()):
        assert_close(name, parameter.detach(), other.detach())
    assert pipe.staleness == {}
