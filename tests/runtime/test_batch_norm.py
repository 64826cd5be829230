"""Running statistics once per batch: equal to a layer that saw the whole batch at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn


class Normed(nn.Module):
    """The first layer normalises the batch itself, so that its statistics can be computed by hand."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(5, momentum=momentum)
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.first(x)).square().mean()


def _train(batch_norm: str, momentum: float | None, recompute: bool) -> dict[str, torch.Tensor]:
    from pipepart import Pipeline

    torch.manual_seed(0)
    model = Normed(momentum)
    pipe = Pipeline(model, (torch.randn(8, 5),), stages=2, microbatches=3, schedule="gpipe", batch_norm=batch_norm,
                    recompute=recompute)  # fmt: skip
    torch.manual_seed(1)
    for _ in range(2):
        pipe.step(3 * torch.randn(8, 5) + 1)
    return pipe.state_dict()


def _compare(momentum: float | None, recompute: bool) -> list[int]:
    whole = nn.BatchNorm1d(5, momentum=momentum)
    torch.manual_seed(1)
    for _ in range(2):
        whole(3 * torch.randn(8, 5) + 1)
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


@pytest.mark.parametrize(("momentum", "recompute"), [(0.1, False), (None, True)])
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
