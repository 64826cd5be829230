"""Batches are copied to an accelerator while it computes, by ranks that need them. The CPU sees nothing of it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from pipepart.lightning import copied_ahead
from pipepart.lightning.copied_ahead import BatchPlaces
from pipepart.lightning.data import LoaderAround, needs_agreement

CPU, META = torch.device("cpu"), torch.device("meta")


class Stream:
    """A stream of a device whose memory is that of the meta device; it writes down what is queued."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def record_event(self) -> Any:
        self.notes.append(f"{self.name} copies")
        return SimpleNamespace(query=lambda: False)

    def wait_event(self, event: Any) -> None:
        self.notes.append(f"{self.name} waits")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    computing = Stream("computing", found)
    monkeypatch.setattr(copied_ahead, "new_stream", lambda device: Stream("side", found))
    monkeypatch.setattr(copied_ahead, "current_stream", lambda device: None if device == CPU else computing)
    monkeypatch.setattr(copied_ahead, "on_stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(copied_ahead, "pinned", lambda tensor, device: found.append("pinned") or tensor)
    monkeypatch.setattr(copied_ahead, "used_on", lambda tensor, stream: found.append(f"used on {stream.name}"))
    return found


def _loader(workers: int = 0) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, num_workers=workers)


ONE = ["pinned", "side copies"]
USED = ["computing waits", "used on computing", "step"]


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (0, [*ONE, *USED, *ONE, *USED, *ONE, *USED]),
        (1, [*ONE, *ONE, *USED, *ONE, *USED, *USED]),  # the next copy is queued before the step on this batch
    ],
)
def test_the_next_batch_is_copied_before_the_step_on_this_one(
    notes: list[str], workers: int, expected: list[str]
) -> None:
    loader = _loader(workers)
    ahead = copied_ahead.copied_ahead(loader, META, lambda: True)
    assert len(ahead) == 3 and ahead.batch_size == 2 and ahead.dataset is loader.dataset
    for (batch,) in ahead:
        assert batch.device == META and batch.shape == (2,)
        notes.append("step")
    assert notes == expected


def test_a_rank_that_does_not_want_batches_copies_none(notes: list[str]) -> None:
    values = [batch.tolist() for (batch,) in copied_ahead.copied_ahead(_loader(), META, lambda: False)]
    assert values == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] and not notes


def test_nothing_changes_on_the_cpu() -> None:
    loader = _loader()
    assert copied_ahead.copied_ahead(loader, CPU, lambda: True) is loader


def test_a_stream_is_known_as_one(notes: list[str]) -> None:
    rows = iter([torch.zeros(2)])
    ahead = copied_ahead.copied_ahead(rows, META, lambda: True)
    assert isinstance(ahead, LoaderAround) and not hasattr(ahead, "__len__")
    assert needs_agreement(ahead) and not needs_agreement(copied_ahead.copied_ahead(_loader(), META, lambda: True))
    assert [batch.device for batch in ahead] == [META]


class Sees(L.Callback):
    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, *args):
        pass


class Moves(L.LightningModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class Looks(L.LightningModule):
    def on_train_batch_start(self, batch, batch_idx):
        pass


def _places(module: L.LightningModule, is_first: bool | None, device: torch.device, *callbacks: Any) -> BatchPlaces:
    """The places in a run; `is_first=None` before there is a plan."""
    strategy = SimpleNamespace(root_device=device)
    trainer: Any = SimpleNamespace(strategy=strategy, lightning_module=module, callbacks=callbacks, datamodule=None)
    runtime = None if is_first is None else SimpleNamespace(is_first=is_first)
    return BatchPlaces(lambda: trainer, SimpleNamespace(runtime=runtime))  # type: ignore[arg-type]


def test_which_ranks_need_a_batch_on_their_device(notes: list[str]) -> None:
    plain, own = L.LightningModule(), ModelCheckpoint()
    assert _places(plain, False, META, own).stay_on_host(), "nothing on this rank reads it"
    assert not _places(plain, True, META).stay_on_host()
    assert not _places(plain, None, META).stay_on_host()
    assert not _places(plain, False, CPU).stay_on_host()
    assert not _places(plain, False, META, Sees()).stay_on_host()
    assert not _places(Looks(), False, META).stay_on_host()
    assert not _places(Moves(), False, META).stay_on_host()


@pytest.mark.parametrize(
    ("module", "is_first", "copies"), [(L.LightningModule, True, 3), (Moves, True, 0), (Looks, False, 0)]
)
def test_hooks_of_the_user_keep_the_order_of_lightning(
    notes: list[str], module: type[L.LightningModule], is_first: bool, copies: int
) -> None:
    for (batch,) in _places(module(), is_first, META).loader(_loader()):
        assert (batch.device == META) == (copies > 0)
    assert notes.count("side copies") == copies
