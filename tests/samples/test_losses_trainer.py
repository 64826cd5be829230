"""Under the Trainer: a language model with padded samples equals plain Lightning on whole batches, in weights and logs."""

from __future__ import annotations

import io
import logging
from functools import cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 11, 6
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1, "num_sanity_val_steps": 0, "precision": "64-true",
}  # fmt: skip


class Language(L.LightningModule):
    """Skewed lengths, labels of -100, and logs of several denominators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens = nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, VOCABULARY)
        self.seen: list[float] = []

    def _values(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        scores = self.head(x)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        mask = labels != -100
        return loss, ((scores.argmax(-1) == labels) & mask).sum() / mask.sum().clamp(min=1), mask.sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, hits, _ = self._values(*batch)
        self.log("loss", loss, sync_dist=True)
        self.log("hits", hits, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, hits, count = self._values(*batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_hits", hits, sync_dist=True)
        self.log("val_tokens", count.double(), reduce_fx="sum", sync_dist=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += [float(self.trainer.callback_metrics[key]) for key in ("loss", "hits")]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class TwoTerms(Language):
    """A term by tokens, one by samples that have any, and one of the parameters alone."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, labels = batch
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        mask = labels != -100
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        some = mask.any(1)
        loss = loss + (x.square().mean((1, 2)) * some).sum() / some.sum().clamp(min=1)
        loss = loss + 1e-2 * self.head.weight.square().sum()
        self.log("loss", loss, sync_dist=True)
        self.log("hits", mask.double().mean(), sync_dist=True)
        return loss


class WithSum(Language):
    """A mean of equal batches and a sum, as in an autoencoder with a divergence that nothing divides."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.tokens(batch[0])
        for layer in self.layers:
            x = x + layer(x).tanh()
        loss = self.head(x).square().mean() + 1e-3 * x.square().sum()
        self.log_dict({"loss": loss, "hits": loss.detach()}, sync_dist=True)
        return loss


class Moved(TwoTerms):
    """A hook sees each batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Stream(torch.utils.data.IterableDataset):
    """Without a length: Lightning itself reads one batch ahead."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def _loader(samples: int, batch_size: int, seed: int, part: tuple[int, int]) -> DataLoader:
    """`part` is the replica and the number of replicas, which together read the batches of one process in order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    lengths = torch.randint(0, 3, (samples,), generator=generator)
    lengths[::3] = LENGTH
    labels = ids.roll(-1, 1).masked_fill(torch.arange(LENGTH)[None] >= lengths[:, None], -100)
    replica, replicas = part
    return DataLoader(TensorDataset(ids[replica::replicas], labels[replica::replicas]), batch_size)


def _fit(
    strategy: Any,
    devices: int,
    batch_size: int,
    samples: int,
    model: type[Language] = Language,
    stream: bool = False,
    **trainer: Any,
) -> Any:
    part = (0, 1)
    if not isinstance(strategy, str):
        from pipepart import PipelineStrategy

        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        part = (rank // strategy["stages"], strategy.get("replicas", 1))
        strategy = PipelineStrategy(**strategy)
    module = model()
    run = L.Trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **QUIET, **trainer)
    loader = _loader(samples, batch_size, 1, part)
    loader = DataLoader(Stream(loader.dataset), batch_size) if stream else loader
    run.fit(module, loader, _loader(samples, batch_size, 2, part))
    state = run.strategy.lightning_module_state_dict()
    return state, module.seen, {key: float(value) for key, value in run.callback_metrics.items()}


@cache
def _plain(batch_size: int, samples: int, model: type[Language] = Language, **trainer: Any) -> Any:
    """Plain Lightning on one device, for all schedules and shapes."""
    return _fit("auto", 1, batch_size, samples, model, **trainer)


def _compare(answers: Any, expected: Any, logs: bool = True) -> None:
    state, seen, metrics = expected
    for key, value in state.items():
        torch.testing.assert_close(answers[0][0][key], value, rtol=1e-8, atol=1e-10)
    for _, own, found in answers:
        if logs:
            assert own == pytest.approx(seen, rel=1e-8)
        assert {k: v for k, v in found.items() if logs or k.startswith("val")} == pytest.approx(
            {k: v for k, v in metrics.items() if logs or k.startswith("val")}, rel=1e-8
        )


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.slow)])
def test_padded_samples(schedule: str) -> None:
    options = {"stages": 2, "microbatches": 4, "schedule": schedule}
    _compare(run_ranks(2, _fit, options, 2, 8, 30), _plain(8, 30))


@pytest.mark.slow
def test_padded_samples_on_two_replicas() -> None:
    """Each replica has half of every batch; the last batches have fewer samples than micro-batches."""
    options = {"stages": 2, "replicas": 2, "microbatches": 3}
    _compare(run_ranks(4, _fit, options, 4, 4, 21), _plain(8, 21))


@pytest.mark.slow
def test_a_sum_that_nothing_divides_is_averaged_over_accumulated_batches() -> None:
    """As Lightning does on one device, also beside a term that is divided."""
    options = {"stages": 2, "microbatches": 3}
    more: dict[str, Any] = {"model": WithSum, "accumulate_grad_batches": 2, "limit_val_batches": 0}
    _compare(run_ranks(2, _fit, options, 2, 6, 24, **more), _plain(6, 24, **more))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_accumulated_batches_are_one(replicas: int) -> None:
    options = {"stages": 2, "replicas": replicas, "microbatches": 3}
    samples, size = 24 * replicas, 12
    answers = run_ranks(
        2 * replicas, _fit, options, 2 * replicas, size // 2, samples, accumulate_grad_batches=2, limit_val_batches=0
    )
    _compare(answers, _plain(size * replicas, samples, limit_val_batches=0), logs=False)


@pytest.mark.parametrize(
    ("replicas", "schedule", "stream"),
    [
        (1, "gpipe", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "1f1b", True), (2, "1f1b", False), (2, "gpipe", True))
        ),
    ],
)
def test_accumulated_batches_of_a_loss_with_two_denominators_are_one(
    replicas: int, schedule: str, stream: bool
) -> None:
    """All batches of a window are read before the first of them is trained on."""
    options = {"stages": 2, "replicas": replicas, "microbatches": 3, "schedule": schedule}
    samples, size = 24 * replicas, 12
    answers = run_ranks(
        2 * replicas, _fit, options, 2 * replicas, size // 2, samples, TwoTerms, stream,
        accumulate_grad_batches=2, limit_val_batches=0,
    )  # fmt: skip
    _compare(answers, _plain(size * replicas, samples, TwoTerms, limit_val_batches=0), logs=False)
    seen = _plain(size // 2 * replicas, samples, TwoTerms, limit_val_batches=0, accumulate_grad_batches=2)[1]
    assert answers[0][1][:4] == pytest.approx(seen[:4], rel=1e-8)  # logs are of each batch, with the first weights
    assert len(answers[0][1]) == len(seen)  # and no batch is lost or read twice


def test_batches_that_a_hook_must_see_in_time_are_not_looked_at() -> None:
    """Batches then have equal weights, as in plain Lightning, and the start message says so."""
    options = {"stages": 1, "microbatches": 3}
    shape: dict[str, Any] = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    told = io.StringIO()
    handler, log = logging.StreamHandler(told), logging.getLogger("pipepart")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        answers = [_fit(options, 1, 6, 24, Moved, **shape)]
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert "Moved.on_after_batch_transfer prevents reading them in advance" in told.getvalue()
    _compare(answers, _plain(6, 24, Moved, **shape))


class Changed(TwoTerms):
    """A hook changes a batch after its window was opened."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[1][:, 0] = -100


def test_a_batch_that_changes_after_it_was_looked_at_is_told() -> None:
    from pipepart.samples.batch_numbers import EqualWeights

    options = {"stages": 1, "microbatches": 3}
    with pytest.warns(EqualWeights, match="batch 2 of 2 accumulated batches has changed"):
        _fit(options, 1, 6, 24, Changed, accumulate_grad_batches=2, limit_val_batches=0)


def test_the_last_batches_of_an_epoch_are_a_shorter_window() -> None:
    """Lightning divides by `accumulate_grad_batches` there too. Only batches that are trained on are read."""
    read: list[int] = []

    class Counted(torch.utils.data.Dataset):
        def __init__(self, data: Any) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return self.data[index]

    from pipepart import PipelineStrategy

    data = _loader(60, 6, 1, (0, 1)).dataset
    module = TwoTerms()
    strategy = PipelineStrategy(stages=1, microbatches=3)
    shape: dict[str, Any] = {"accumulate_grad_batches": 4, "limit_train_batches": 6}
    trainer = L.Trainer(strategy=strategy, devices=1, **QUIET, **shape)
    trainer.fit(module, DataLoader(Counted(data), 6))
    assert sorted(set(read)) == list(range(36))
    expected = TwoTerms().double()
    expected.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    for batches in ((0, 1, 2, 3), (4, 5)):
        rows = [data[6 * batch + row] for batch in batches for row in range(6)]
        loss = expected.training_step([torch.stack(column) for column in zip(*rows)], 0)
        gradients = torch.autograd.grad(loss, list(expected.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), gradients):
                parameter -= 0.5 * gradient * len(batches) / 4
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-8, atol=1e-10)
