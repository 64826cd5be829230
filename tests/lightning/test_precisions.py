"""Precision plugins that users derive from those of Lightning: equal to one device."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from realistic import Boring, build
from support.ranks import run_ranks
from torch.utils._pytree import tree_map
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.errors import ConfigError
from pipepart.lightning.precisions import check_precision


class Doubled(Precision):
    """Computes in double precision, and halves each step of the optimizer."""

    precision: Any = "doubled"

    def convert_module(self, module):
        return module.double()

    def convert_input(self, data):
        return tree_map(lambda x: x.double(), data)

    def optimizer_step(self, optimizer, model, closure, **kwargs):
        before = [p.detach().clone() for p in model.parameters()]
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        with torch.no_grad():
            for old, new in zip(before, model.parameters()):
                new.add_(old).mul_(0.5)
        return result


class OwnContext(MixedPrecision):
    """bfloat16, in a context of the user's own."""

    @contextmanager
    def forward_context(self):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            yield


PLUGINS: dict[str, Any] = {"doubled": Doubled, "context": lambda: OwnContext("bf16-mixed", "cpu"), "plain": Precision}


def _fit(name: str, pipeline: bool, microbatches: int = 1) -> dict[str, torch.Tensor]:
    _, train, _ = build("boring", dtype=torch.float32)
    torch.manual_seed(0)
    module = Boring()
    strategy = PipelineStrategy(stages=2, microbatches=microbatches, split_at=["layer.2"]) if pipeline else "auto"
    options = {**QUIET, "plugins": [PLUGINS[name]()], "max_steps": 4}
    L.Trainer(strategy=strategy, devices=2 if pipeline else 1, **options).fit(module, train)
    return module.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "microbatches", "tolerance"), [("doubled", 3, 1e-9), ("context", 1, 1e-6)])
def test_plugins_of_users_equal_one_device(name: str, microbatches: int, tolerance: float) -> None:
    expected, plain = _fit(name, False), _fit("plain", False)
    difference = max(float((expected[key] - plain[key]).abs().max()) for key in plain)
    assert difference > 10 * tolerance, "the plugin has an effect"
    for found in run_ranks(2, _fit, name, True, microbatches):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "words"), [(TransformerEnginePrecision, "scales for float8"), (BitsandbytesPrecision, "quantised")]
)
def test_plugins_of_other_libraries_are_refused_with_the_reason(kind: type, words: str) -> None:
    plugin = kind.__new__(kind)  # their constructors need libraries that are not installed
    with pytest.raises(ConfigError, match=rf"{kind.__name__} is not supported in a pipeline.*{words}"):
        check_precision(plugin)
