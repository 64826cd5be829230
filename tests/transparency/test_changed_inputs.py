"""Models that change their input in place: micro-batches have memory of their own, and the user's batch stays as it is."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from support.reference import assert_close
from torch import nn


class Changing(nn.Module):
    """Changes its input in place in three ways, and uses it at the start and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x[:, 0] = 1.0
        x += 1
        h = x
        for layer in self.layers:
            h = layer(h).tanh()
        return (h + x - y).pow(2).mean()


def _equal(schedule: str) -> None:
    from pipepart import Pipeline

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model, plain = Changing(), Changing()
        plain.load_state_dict(model.state_dict())
        example = torch.randn(8, 8), torch.randn(8, 8)
        pipe = Pipeline(model, example, stages=2, microbatches=4, schedule=schedule)
        for samples in (8, 7):
            batch = torch.randn(samples, 8), torch.randn(samples, 8)
            given = tuple(leaf.clone() for leaf in batch)
            plain.zero_grad()
            for parameter in pipe.parameters():
                parameter.grad = None
            loss = pipe.step(*given)
            expected = plain(*(leaf.clone() for leaf in batch))
            expected.backward()
            assert_close("loss", loss, expected.detach(), 1e-9)
            gradients = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert_close(name, parameter.grad, gradients[name].grad, 1e-9)
            assert all(torch.equal(a, b) for a, b in zip(given, batch))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "schedule", ["gpipe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "zb_h1"))]
)
def test_equal_to_one_process(schedule: str) -> None:
    run_ranks(2, _equal, schedule)


def test_a_recording_says_which_inputs_it_changes() -> None:
    from pipepart.recording import record

    assert record(Changing(), (torch.randn(4, 8), torch.randn(4, 8))).changed_inputs == {"x"}
