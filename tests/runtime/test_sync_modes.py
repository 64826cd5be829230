"""Every mode of `sync` that promises it gives the result of one process on the batches of all replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import GPT
from support.ranks import error_of, run_ranks
from support.reference import assert_close
from torch import nn

from pipepart import Pipeline
from pipepart.runtime.sync import balanced_owners
from recipes import gpt as recipe

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4),
}
STEPS = 10


def _model() -> GPT:
    """A language model with a tied head, and positions that do not learn."""
    torch.manual_seed(0)
    model = GPT(depth=2).double()
    model.positions.weight.requires_grad_(False)
    return model


def _batches(replicas: int) -> Iterator[list[list[tuple[torch.Tensor, ...]]]]:
    """For each step and each replica the batches that it accumulates; the last of all is smaller on the last replica."""
    torch.manual_seed(1)
    for step in range(STEPS):
        sizes = [[4, 4] for _ in range(replicas)]
        if step == STEPS - 1:
            sizes[-1][-1] = 3
        yield [[GPT.batch(size) for size in own] for own in sizes]


def _reference(optimizer: str, replicas: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, norms = _model(), []
    stepping = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for batches in _batches(replicas):
        everything = [batch for own in batches for batch in own]
        loss = 2 * model(*(torch.cat(leaves) for leaves in zip(*everything)))  # as in a loop over two batches
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        stepping.step()
        stepping.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def train(sync: Any, stages: int, optimizer: str) -> dict[str, Any]:
    model = _model()
    replicas = dist.get_world_size() // stages
    # On a busy machine, measured costs may leave a stage without parameters that are trained.
    cut: dict[str, Any] = {"schedule": "1f1b", "split_at": ["blocks.1"]} if stages > 1 else {}
    pipe = Pipeline(model, GPT.batch(4), stages=stages, microbatches=2, sync=sync, **cut)
    trained = [p for p in pipe.parameters() if p.requires_grad]
    stepping = OPTIMIZERS[optimizer](trained)
    norms, mine = [], dist.get_rank() // stages
    for batches in _batches(replicas):
        pipe.steps(batches[mine])
        norms.append(float(pipe.clip_grad_norm_(1.0)))
        stepping.step()
        stepping.zero_grad()
    states = sum(p.numel() for p in trained if stepping.state.get(p))
    with pipe.whole_parameters():
        held = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    return {"held": held, "norms": norms, "states": states, "trained": sum(p.numel() for p in trained)}


def check(found: list[dict[str, Any]], stages: int, optimizer: str) -> None:
    replicas = len(found) // stages
    expected, norms = _reference(optimizer, replicas)
    for rank, result in enumerate(found):
        assert result["norms"] == pytest.approx(norms, rel=1e-9)
        for name, values in result["held"].items():
            assert_close(f"rank {rank}: {name}", values, expected[name])
            assert torch.equal(values, found[rank % stages]["held"][name]), f"{name} differs between replicas"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "stages", "optimizer"),
    [
        ("sharded", 2, "adamw"),
        ("fsdp", 2, "adamw"),
        ("master", 1, "sgd"),
        ("sharded", 1, "adagrad"),
        ({"mode": "mean", "inside": 2}, 1, "sgd"),
    ],
    ids=["sharded", "fsdp", "master", "adagrad", "nested"],
)
def test_equal_to_one_process(sync: Any, stages: int, optimizer: str) -> None:
    found = run_ranks(4, train, sync, stages, optimizer)
    check(found, stages, optimizer)
    for stage in range(stages):
        of_stage = found[stage::stages]
        share = [result["states"] / result["trained"] for result in of_stage]
        if sync in ("sharded", "fsdp"):
            assert sum(share) == pytest.approx(1.0) and all(share)
        elif sync == "master":
            assert share == [1.0] + [0.0] * (len(share) - 1)
        else:
            assert share == [1.0] * len(share)


def _chosen() -> tuple[str, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    pipe = Pipeline(_model(), GPT.batch(4), stages=1, microbatches=2, sync="auto")
    pipe.step(*GPT.batch(4))
    return pipe.plan.sync, {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_the_mode_that_the_plan_has_chosen_is_run() -> None:
    (chosen, first), (other, second) = run_ranks(2, _chosen)
    assert chosen == other == '"mean"'
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_owners_are_balanced_by_size_with_trained_parameters_first() -> None:
    sizes = {"a": 8, "b": 5, "c": 5, "frozen": 100, "d": 2}
    owners = balanced_owners(sizes, 2, {"a", "b", "c", "d"})
    load = [sum(sizes[name] for name, owner in owners.items() if owner == r and name != "frozen") for r in range(2)]
    assert sorted(load) == [10, 10]
    assert balanced_owners(sizes, 1, set(sizes)) == dict.fromkeys(owners, 0)


@pytest.mark.parametrize("replicas", [2, 4])
def test_shares_of_the_gpt_recipe_are_even(replicas: int) -> None:
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in recipe.GPT(256).named_parameters()}
    owners = balanced_owners(sizes, replicas, set(sizes))
    load = [sum(sizes[name] for name, owner in owners.items() if owner == r) for r in range(replicas)]
    assert max(load) <= 1.05 / replicas * sum(sizes.values())


def _own_update(sync: str) -> str:
    """A loop that updates parameters itself, where there is a gradient."""
    pipe = Pipeline(_model(), GPT.batch(4), stages=1, microbatches=2, sync=sync)

    def loop() -> None:
        for _ in range(2):
            pipe.step(*GPT.batch(4))
            with torch.no_grad():
                for parameter in pipe.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None

    return error_of(loop)


@pytest.mark.slow
def test_an_update_of_one_replica_alone_is_refused() -> None:
    for answer in run_ranks(2, _own_update, "sharded"):
        assert "was changed on replica" in answer and "after the step of a torch.optim.Optimizer" in answer
    assert run_ranks(2, _own_update, "mean") == ["no error"] * 2


def _gradients(sync: Any) -> list[tuple[str, torch.Tensor | None, torch.Tensor]]:
    pipe = Pipeline(_model(), GPT.batch(4), stages=2, microbatches=2, sync=sync)
    torch.manual_seed(dist.get_rank() // 2)
    pipe.step(*GPT.batch(4))
    own = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
    with pipe.whole_parameters(gradients=True):
        whole = {name: p.grad.clone() for name, p in pipe.module.named_parameters() if p.grad is not None}
    assert {name for name, p in pipe.named_parameters() if p.grad is not None} == {
        n for n, g in own.items() if g is not None
    }
    return [(name, own.get(name), gradient) for name, gradient in whole.items()]


@pytest.mark.slow
def test_whole_gradients_and_compressed_ones() -> None:
    means, shares, rounded = (
        run_ranks(4, _gradients, sync) for sync in ("mean", "sharded", {"mode": "sharded", "compress": "bf16"})
    )
    for rank in range(4):
        assert [name for name, _, _ in shares[rank]] == [name for name, _, _ in means[rank]]
        for (name, own, whole), (_, _, mean), (_, _, near) in zip(shares[rank], means[rank], rounded[rank]):
            assert_close(name, whole, mean)
            assert own is None or torch.equal(own, whole)
            assert_close(name, near, mean, 2e-2)
            assert not torch.equal(near, whole)
    for name in {name for rank in range(4) for name, own, _ in shares[rank] if own is not None}:
        owning = [rank for rank in range(4) if {n: own for n, own, _ in shares[rank]}[name] is not None]
        assert len({rank % 2 for rank in owning}) == len(owning), f"{name} has a gradient on two replicas"
