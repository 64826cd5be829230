"""One test per bug that was found after the fact."""

from __future__ import annotations

import lightning as L
import torch
from support.lightning_modules import Module, loader

from pipepart import PipelineStrategy


def _order(strategy) -> list[float]:
    L.seed_everything(11, verbose=False)  # leaves PL_GLOBAL_SEED behind, which some strategies seed again from
    torch.rand(3)  # a user's own numbers before the fit
    module = Module("mlp")
    trainer = L.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader("mlp", 40, 8, shuffle=True))
    return module.seen


def test_a_global_seed_is_not_set_again_by_the_strategy(monkeypatch) -> None:
    """One device does not seed again when a fit starts, so the order of shuffled data was another one."""
    monkeypatch.setenv(
        "PL_GLOBAL_SEED", "1"
    )  # put back afterwards: seed_everything would leave its own for other tests
    first = _order(PipelineStrategy(stages=1))
    second = _order("auto")
    assert torch.allclose(torch.tensor(first), torch.tensor(second), rtol=1e-5)
