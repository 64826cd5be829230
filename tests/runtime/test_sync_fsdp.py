"""The mode `fsdp`: each replica keeps its share of parameters, gradients and optimizer states, and borrows the rest."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import error_of, run_ranks
from support.reference import assert_close
from torch import nn

from pipepart import Pipeline

LAYERS, WIDTH = 8, 16
CUTS = ["layers.2", "layers.4", "layers.6"]


class Net(nn.Module):
    """Layers of one size; two of them in different chunks of a stage are tied, and one is frozen."""

    def __init__(self, tied: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS)).double()
        if tied:
            self.layers[4].weight = self.layers[0].weight
            self.layers[3].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, y)


def _batch(size: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, width, dtype=torch.float64), torch.randn(size, width, dtype=torch.float64)


def _batches() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Two replicas; the last batch of the second one has one micro-batch only."""
    torch.manual_seed(1)
    return [[_batch(8), _batch(8)], [_batch(8), _batch(8)], [_batch(8), _batch(1)]]


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def _reference() -> tuple[dict[str, torch.Tensor], float]:
    model = Net()
    stepping = _adam(p for p in model.parameters() if p.requires_grad)
    for own in _batches():
        model(*(torch.cat(leaves) for leaves in zip(*own))).backward()
        stepping.step()
        stepping.zero_grad()
    with torch.no_grad():
        return {name: p.detach() for name, p in model.named_parameters()}, float(model(*_batches()[0][0]))


def _train(gather: str, schedule: str) -> dict[str, Any]:
    pipe = Pipeline(
        Net(), _batch(8), stages=2, chunks=2, microbatches=4, schedule=schedule, split_at=CUTS,
        recompute=schedule != "zb_v", sync={"mode": "fsdp", "gather": gather},
    )  # fmt: skip
    stepping = _adam(p for p in pipe.parameters() if p.requires_grad)
    for own in _batches():
        pipe.step(*own[dist.get_rank() // 2])
        stepping.step()
        stepping.zero_grad()
    loss = float(pipe.evaluate(*_batches()[0][0]))
    with pipe.whole_parameters():
        inside = error_of(lambda: pipe.step(*_batch(8)))
        held = {name: p.detach().clone() for name, p in pipe.module.named_parameters()}
    return {
        "held": held,
        "loss": loss,
        "state": pipe.state_dict(),
        "at rest": error_of(lambda: [p.sum() for p in pipe.parameters()]),
        "inside": inside,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("gather", "schedule"), [("microbatch", "interleaved"), ("step", "zb_v")])
def test_several_chunks_of_a_stage_and_a_batch_of_one_sample(gather: str, schedule: str) -> None:
    expected, loss = _reference()
    found = run_ranks(4, _train, gather, schedule)
    for rank, result in enumerate(found):
        assert result["loss"] == pytest.approx(loss, rel=1e-9)
        for name, values in expected.items():
            assert_close(f"rank {rank}: {name}", result["held"][name], values)
        assert "lives on stage" in result["at rest"] and "this rank holds no values of it" in result["at rest"]
        assert "while every rank holds all parameters" in result["inside"]
    for name, values in expected.items():
        assert_close(f"state dict: {name}", found[0]["state"][name], values)
    assert all(not result["state"] for result in found[1:])


def _tensors() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors of this process."""
    gc.collect()
    found: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = storage
    return found


def _memory() -> dict[str, Any]:
    before = _tensors()
    pipe = Pipeline(Net(False, 64), _batch(8, 64), stages=1, microbatches=2, sync="fsdp")
    stepping = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for _ in range(2):
        stepping.zero_grad()
        pipe.step(*_batch(8, 64))
        stepping.step()
    own = {name: p for name, p in pipe.named_parameters() if not p.is_meta}
    with torch.no_grad():  # an update by hand, where there are gradients: replicas borrow its result
        for parameter in own.values():
            parameter.copy_(torch.full_like(parameter, float(dist.get_rank() + 1)))
    held = sum(storage.nbytes() for key, storage in _tensors().items() if key not in before)
    with pipe.whole_parameters():
        values = {name: p.unique().tolist() for name, p in pipe.named_parameters()}
    return {"held": held, "own": sorted(own), "values": values}


@pytest.mark.slow
def test_a_rank_keeps_its_share_of_parameters_gradients_and_states() -> None:
    found = run_ranks(2, _memory)
    whole = 4 * LAYERS * 64 * 64 * 8  # a parameter, its gradient, and two numbers of Adam
    for result in found:
        assert 0.45 * whole < result["held"] <= 0.55 * whole
        assert len(result["own"]) == LAYERS // 2
        for rank, other in enumerate(found):
            assert all(result["values"][name] == [rank + 1.0] for name in other["own"])


class Shared(Net):
    def __init__(self) -> None:
        super().__init__(tied=False)
        self.layers[2].weight = nn.Parameter(self.layers[1].weight.detach())


def _shared() -> str:
    return error_of(lambda: Pipeline(Shared(), _batch(8), stages=1, microbatches=2, sync="fsdp"))


@pytest.mark.slow
def test_parameters_that_share_memory_are_refused() -> None:
    for answer in run_ranks(2, _shared):
        assert "'layers.1.weight' and 'layers.2.weight' share memory" in answer
