"""Where batches come from: every replica has one truth, whatever the ranks of its other stages read."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import pytest
import torch
from realistic import Rows, build
from support.ranks import run_ranks
from torch.utils.data import DataLoader, IterableDataset
from watching import QUIET, Notes, assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy


class Stream(IterableDataset):
    """Reads from a list; how long it is may differ between ranks."""

    def __init__(self, rows: list[Any], count: int) -> None:
        self.rows, self.count = rows, count

    def __iter__(self):
        return iter(self.rows[: self.count])


def _streams(pipeline: bool, devices: int) -> dict[str, Any]:
    module, train, val = build("many_losses", samples=24)
    rank = torch.distributed.get_rank() if devices > 1 else 0
    rows = train.dataset.rows
    count = 20 if rank == 0 else 9  # the other stage would see 3 batches of other samples, not 5
    rows = rows if rank == 0 else rows[::-1]
    stream = DataLoader(Stream(rows, count), batch_size=4)
    chosen = PipelineStrategy(stages=2, microbatches=2) if pipeline else "auto"
    return run_fit(module, stream, DataLoader(Stream(val.dataset.rows, 12), batch_size=5), chosen, devices)


@pytest.mark.slow
def test_stream_ends_on_all_ranks_when_the_first_stage_is_done() -> None:
    expected = _streams(False, 1)
    assert expected["step"] == 10
    answers = run_ranks(2, _streams, True, 2, timeout=240)
    for rank, answer in enumerate(answers):
        assert_same_run(answer, expected, f"rank {rank}")
    assert_same_state(answers[0]["state"], expected["state"], "stream")


class Augmented(Rows):
    """Random augmentation in Python, another one on every rank."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + random.random(), y


def _augmented(pipeline: bool, devices: int) -> dict[str, Any]:
    rank = torch.distributed.get_rank() if devices > 1 else 0
    module, _, val = build("many_losses")
    data = Augmented(type(module).sample, 20, 4, torch.float64)
    random.seed(17 + rank)
    torch.manual_seed(17 + rank)  # the order differs too
    loader = DataLoader(data, batch_size=8, shuffle=True)
    chosen = PipelineStrategy(stages=2, microbatches=2) if pipeline else "auto"
    return run_fit(module, loader, val, chosen, devices)


def test_shuffling_and_augmentation_of_the_first_stage_count() -> None:
    """Labels and inputs come from the same reading, and from the same random numbers as on one device."""
    answers = run_ranks(2, _augmented, True, 2)
    expected = _augmented(False, 1)
    for rank, answer in enumerate(answers):
        assert_same_run(answer, expected, f"rank {rank}")
    assert_same_state(answers[0]["state"], expected["state"], "augmented")


class Seen(L.Callback):
    def __init__(self) -> None:
        self.indices: list[int] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.indices += batch[1].tolist()


class Numbers(L.LightningDataModule):
    """A data module; the label is the number of the sample."""

    def setup(self, stage):
        assert stage == "fit"
        torch.manual_seed(0)
        self.rows = [(torch.randn(12).double(), index) for index in range(24)]

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=4, shuffle=True)


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.net(x)[:, 0] - y / 24).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("first", y[0].float(), on_step=True, on_epoch=False, sync_dist=True, reduce_fx="max")
        self.log("total", y.sum(), on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.gathered = self.all_gather(torch.tensor(float(self.trainer.strategy.distributed_sampler_kwargs["rank"])))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _replicas() -> tuple[list[int], dict[str, float], list[float], Any]:
    seen, module = Seen(), Regression()
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=2, microbatches=2), devices=4, max_epochs=1, callbacks=[seen],
        **{**QUIET, "use_distributed_sampler": True, "logger": False},
    )  # fmt: skip
    trainer.fit(module, datamodule=Numbers())
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return seen.indices, metrics, module.gathered.flatten().tolist(), trainer.strategy.lightning_module_state_dict()


@pytest.mark.slow
def test_replicas_share_the_data_and_the_logs() -> None:
    """Every sample is seen once; `sync_dist` reduces over replicas, not over stages; so does `all_gather`."""
    answers = run_ranks(4, _replicas)
    assert answers[0][0] == answers[1][0]
    assert sorted(answers[0][0] + answers[2][0]) == list(range(24))
    assert all(answer[1] == answers[0][1] for answer in answers)
    assert answers[0][1]["total"] == sum(range(24)), "over micro-batches, batches and replicas"
    assert all(answer[2] == [0.0, 1.0] for answer in answers)
    # One process on the union of what both replicas have read, batch by batch.
    model, data = Regression(), Numbers()
    data.setup("fit")
    optimizer = model.configure_optimizers()
    for start in range(0, 12, 4):
        rows = [data.rows[i] for replica in (0, 2) for i in answers[replica][0][start : start + 4]]
        x, y = torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
        optimizer.zero_grad()
        (model.net(x)[:, 0] - y / 24).pow(2).mean().backward()
        optimizer.step()
    assert_same_state(answers[0][3], model.state_dict(), "replicas on different data")


def _several_loaders(pipeline: bool, devices: int) -> dict[str, Any]:
    """Training on two loaders at once: the batch is a dict of two."""
    module, first, _ = build("many_losses", samples=16)
    second = DataLoader(Rows(type(module).sample, 8, 9, torch.float64), batch_size=4)
    own = type(module).training_step

    class Both(type(module)):  # type: ignore[misc]
        def training_step(self, batch, batch_idx):
            return own(self, batch["a"], batch_idx) + 0.5 * sum(self.losses(batch["b"]).values())

    module.__class__ = Both
    loaders = L.pytorch.utilities.CombinedLoader(
        {"a": DataLoader(first.dataset, batch_size=4), "b": second}, "max_size_cycle"
    )
    chosen = PipelineStrategy(stages=2, microbatches=2) if pipeline else "auto"
    return run_fit(module, loaders, None, chosen, devices)


@pytest.mark.slow
def test_combined_loaders_and_nested_batches() -> None:
    expected = _several_loaders(False, 1)
    answers = run_ranks(2, _several_loaders, True, 2)
    assert_same_run(answers[1], expected, "combined")
    assert_same_state(answers[0]["state"], expected["state"], "combined")


class Places:
    """A loader of one's own that knows how far it is."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.place = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def _in_the_middle(pipeline: bool, devices: int, folder: str) -> list[list[float]]:
    """Stop after 2 of 5 batches, go on in a new trainer."""
    found = []
    path = f"{folder}/middle-{pipeline}.ckpt"
    for steps, resume in ((2, None), (7, path)):
        module, train, _ = build("many_losses", samples=20, batch_size=4)
        chosen = PipelineStrategy(stages=2, microbatches=2) if pipeline else "auto"
        notes = Notes()
        trainer = L.Trainer(strategy=chosen, devices=devices, max_steps=steps, callbacks=[notes], **QUIET)
        trainer.fit(module, Places(list(train)), ckpt_path=resume)
        trainer.save_checkpoint(path)
        found.append(notes.losses)
    return found


@pytest.mark.slow
def test_stateful_loader_goes_on_where_it_was(tmp_path) -> None:
    """As on one device: planning has looked at the first batch, and has not taken it."""
    expected = _in_the_middle(False, 1, str(tmp_path))
    assert [len(losses) for losses in expected] == [2, 5]
    for answer in run_ranks(2, _in_the_middle, True, 2, str(tmp_path)):
        for losses, wanted in zip(answer, expected):
            assert losses == pytest.approx(wanted, rel=1e-8)
