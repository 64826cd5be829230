"""LBFGS over stages: the same steps, evaluations and checkpoints as on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.ranks import error_of, run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from watching import QUIET

from pipepart import PipelineStrategy


class Net(L.LightningModule):
    """Two layers share their weight, which two stages hold and which counts once."""

    def __init__(self, search: str | None) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.second.weight = self.first.weight
        self.final = nn.Identity()
        self.search, self.losses = search, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.final(self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.LBFGS(
            self.parameters(), lr=0.3, max_iter=4, history_size=3, line_search_fn=self.search, tolerance_change=1e-12
        )


def _fit(search: str | None, cut: str | None, path: str, resume: str | None = None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    x = torch.randn(32, 6, dtype=torch.float64)
    data = DataLoader(TensorDataset(x, x[:, :1].sin() + x[:, 1:2]), batch_size=16)
    torch.manual_seed(2)
    module = options.pop("kind", Net)(search).double()
    chosen = {"stages": 2, "microbatches": 2, "split_at": [cut], **options}
    if chosen["stages"] == 1:
        del chosen["split_at"]
    strategy = PipelineStrategy(**chosen) if cut else "auto"
    trainer = L.Trainer(strategy=strategy, devices=2 if cut else 1, max_epochs=4 if resume else 2, **QUIET)
    trainer.fit(module, data, ckpt_path=resume)
    trainer.save_checkpoint(path)
    return {**module.state_dict(), "losses": torch.tensor(module.losses), "steps": trainer.global_step}


def _state(path: str) -> dict[str, Any]:
    return torch.load(path, weights_only=True)["optimizer_states"][0]["state"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("search", "cut"), [(None, "final"), ("strong_wolfe", "second")])
def test_equal_to_one_device_with_checkpoint_and_resume(search: str | None, cut: str, tmp_path: Path) -> None:
    one, two, more = (str(tmp_path / name) for name in ("one.ckpt", "two.ckpt", "more.ckpt"))
    expected = _fit(search, None, one)
    assert expected["losses"][-1] < 0.7 * expected["losses"][0]
    for found in run_ranks(2, _fit, search, cut, two):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    ours, theirs = _state(two), _state(one)
    assert set(ours) == set(theirs)
    assert ours["func_evals"] == theirs["func_evals"]
    for key in ("d", "prev_flat_grad", "old_dirs", "old_stps"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-9)
    resumed = _fit(search, None, more, resume=one)
    for found in run_ranks(2, _fit, search, cut, more, resume=two):
        torch.testing.assert_close(found, resumed, rtol=1e-6, atol=1e-8)


class Late(Net):
    """Needs what a hook sets when the training starts: it is planned after its optimizer was made."""

    def on_train_start(self):
        self.weight = 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.weight


@pytest.mark.slow
def test_a_plan_that_is_made_after_the_optimizer(tmp_path: Path) -> None:
    one, two, more = (str(tmp_path / name) for name in ("one.ckpt", "two.ckpt", "more.ckpt"))
    expected = _fit(None, None, one, kind=Late)
    for found in run_ranks(2, _fit, None, "second", two, kind=Late):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    resumed = _fit(None, None, more, resume=one, kind=Late)
    for found in run_ranks(2, _fit, None, "second", more, resume=two, kind=Late):
        torch.testing.assert_close(found, resumed, rtol=1e-6, atol=1e-8)


class Manual(Net):
    def __init__(self, search: str | None) -> None:
        super().__init__(search)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step(lambda: loss)


def _refused(path: str) -> list[str]:
    cases: list[dict[str, Any]] = [{"sharded": True}, {"stages": 1}, {"kind": Manual}]
    return [error_of(lambda options=options: _fit(None, "second", path, **options)) for options in cases]


def test_shards_replicas_and_manual_steps_are_refused(tmp_path: Path) -> None:
    for shards, replicas, manual in run_ranks(2, _refused, str(tmp_path / "shards")):
        assert "the state of LBFGS is one vector over all parameters" in shards
        assert "LBFGS decides by the loss, and each replica has the loss of its own batch" in replicas
        assert "which may run the closure several times (LBFGS" in manual
