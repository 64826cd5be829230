"""Code of inductor: nothing is compiled after the first steps, and gradients are those without a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from pipepart import Pipeline

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2), nn.Linear(6, 6), nn.Linear(6, 1)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def steps(compile: Any, schedule: str, cache: str) -> dict[str, Any]:
    """Gradients, and the numbers of graphs that were divided and of codes that were found on disk, after each step."""
    import os

    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    counters.clear()
    model = Small()
    torch.manual_seed(0)
    x = torch.arange(24.0, dtype=torch.float64).reshape(4, 6) / 24
    options: dict[str, Any] = {"split_at": ["net.2"], "compile": compile, "timeout": 1500.0}
    pipe = Pipeline(model, (x,), stages=2, microbatches=2, schedule=schedule, **options)
    seen = []
    for _ in range(4):
        pipe.step(x)
        seen.append((counters["aot_autograd"]["total"], counters["inductor"]["fxgraph_cache_miss"]))
    gradients = {n: p.grad for n, p in model.named_parameters() if isinstance(p.grad, torch.Tensor)}
    return {"gradients": gradients, "seen": seen, "hits": counters["inductor"]["fxgraph_cache_hit"]}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb_h1"])
def test_compiled_once_and_kept_on_disk(schedule: str, tmp_path: Path) -> None:
    expected = run_ranks(2, steps, False, schedule, str(tmp_path), timeout=300)
    first = run_ranks(2, steps, True, schedule, str(tmp_path), timeout=1800)
    second = run_ranks(2, steps, True, schedule, str(tmp_path), timeout=1800)
    for plain, new, again in zip(expected, first, second):
        for found in (new, again):
            assert found["seen"][0][0] > 0, "nothing was compiled"
            assert found["seen"][0] == found["seen"][-1], "something was compiled after the first step"
            for name, gradient in plain["gradients"].items():
                torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-9, atol=1e-12)
        assert new["seen"][0][1] > 0
        assert again["seen"][0][1] == 0, "code was made again"
        assert again["hits"] == new["seen"][0][1]
