"""Running statistics once per batch: equal to a layer that saw the whole batch at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn


class Normed(nn.Module):
    """The first layer normalises the batch itself, so that its statistics can be computed by hand."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(5, momentum=momentum).double()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.first(x)).square().mean()


def _train(batch_norm: str, momentum: float | None, recompute: bool) -> dict[str, torch.Tensor]:
    from pipepart import Pipeline

    torch.manual_seed(0)
    model = Normed(momentum).double()
    pipe = Pipeline(model, (torch.randn(8, 5).double(),), stages=2, microbatches=3, schedule="gpipe", batch_norm=batch_norm,
                    recompute=recompute)  # fmt: skip
    torch.manual_seed(1)
    for _ in range(2):
        pipe.step(3 * torch.randn(8, 5).double() + 1)
    return pipe.state_dict()


def _compare(momentum: float | None, recompute: bool) -> list[int]:
    whole = nn.BatchNorm1d(5, momentum=momentum).double()
    torch.manual_seed(1)
    for _ in range(2):
        whole(3 * torch.randn(8, 5).double() + 1)
    state = _train("batch", momentum, recompute)
    each = _train("microbatch", momentum, recompute)
    if dist.get_rank() == 0:
        torch.testing.assert_close(state["first.running_mean"], whole.running_mean)
        torch.testing.assert_close(state["first.running_var"], whole.running_var)
        assert not torch.allclose(each["first.running_var"], whole.running_var, rtol=1e-3)
        return [
            int(s[key]) for s in (state, each) for key in ("first.num_batches_tracked", "layers.1.num_batches_tracked")
        ]
    return []


@pytest.mark.parametrize(("momentum", "recompute"), [(0.1, False), pytest.param(None, True, marks=pytest.mark.slow)])
def test_one_update_per_batch(momentum: float | None, recompute: bool) -> None:
    assert run_ranks(2, _compare, momentum, recompute)[0] == [2, 2, 6, 6]


def test_a_bare_function_is_refused_by_name() -> None:
    from pipepart import Pipeline
    from pipepart.errors import ConfigError

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))
            self.register_buffer("mean", torch.zeros(5))
            self.register_buffer("var", torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                nn.functional.batch_norm(x * self.weight, self.mean, self.var, training=self.training).square().mean()
            )

    with pytest.raises(ConfigError, match=r"needs torch\.nn\.BatchNorm layers"):
        Pipeline(Bare(), (torch.randn(4, 5),), stages=1, batch_norm="batch")
    with pytest.raises(ConfigError, match="did you mean 'batch'"):
        Pipeline(Bare(), (torch.randn(4, 5),), stages=1, batch_norm="bacth")


class Ghost(nn.Module):
    """Ghost batch normalisation, as TabNet has it: the batch is cut into virtual batches, each with its own statistics."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.norm = size, nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.norm(part) for part in x.chunk(int(np.ceil(x.shape[0] / self.size)), 0)])


def _ghosts(stages: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    from pipepart import Pipeline

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), Ghost(2), nn.ReLU(), nn.Linear(8, 8), Ghost(4), nn.Linear(8, 1)).double()
    model.append(Squared())
    x, held = torch.randn(8, 5).double(), model
    if stages:
        held = Pipeline(model, (x,), stages=stages, microbatches=2, schedule="gpipe")
        loss = held.step(x)
    else:
        loss = model(x)
        loss.backward()
    gradients = {name: p.grad for name, p in held.named_parameters()}
    buffers = {
        name: b for name, b in (held.state_dict() if stages else model.state_dict()).items() if "running" in name
    }
    return loss.detach(), gradients, buffers


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_virtual_batches_that_fit_into_micro_batches_are_those_of_the_whole_batch() -> None:
    """Batches of 8, micro-batches of 4, virtual batches of 2 and of 4: the same statistics in the same order."""
    loss, wanted, buffers = _ghosts(0)
    answers = run_ranks(2, _ghosts, 2)
    seen = set()
    for got, gradients, _ in answers:
        torch.testing.assert_close(got, loss, rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-14)
        seen |= set(gradients)
    assert seen == set(wanted)
    for name, value in answers[0][2].items():
        torch.testing.assert_close(value, buffers[name], rtol=1e-9, atol=1e-14)
    assert set(answers[0][2]) == set(buffers)
