"""Checkpoints at addresses of an object store and of fsspec's memory: the promises of those on a disk."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from realistic import build
from support.object_store import BUCKET, made_store
from support.ranks import error_of, run_ranks
from watching import ONE_RANK, QUIET, Notes

from pipepart import PipelineMonitor, PipelineStrategy
from pipepart.errors import ConfigError
from pipepart.lightning import remote_shards, sharded
from pipepart.lightning.checkpoint_files import CheckpointError, SafeCheckpointIO, verify
from pipepart.lightning.remote_files import RemoteFile, check_address, is_remote
from pipepart.lightning.sealed_file import fault_of_seal


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    with made_store() as environment:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            yield environment


def _content(value: float) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((1000,), value)}, "epoch": 1}


def _write(kind: str, value: float, address: str) -> None:
    if kind == "plain":
        SafeCheckpointIO().save_checkpoint(_content(value), address)
    else:
        sharded.save(_content(value), address, ONE_RANK, lambda step: step())


def _value(address: str, folder: Path) -> float:
    """What is in a checkpoint of either kind, after it was held against its digests."""
    io = SafeCheckpointIO()
    if not sharded.is_sharded(address):
        return float(io.load_checkpoint(address)["state_dict"]["weight"][0])
    sharded.consolidate(address, folder / "whole.ckpt")
    verify(folder / "whole.ckpt")
    return float(io.load_checkpoint(folder / "whole.ckpt")["state_dict"]["weight"][0])


def _damaged(file: RemoteFile, cut: bool) -> None:
    data = bytearray(file.read())
    if cut:
        data = data[:-100]
    else:
        data[len(data) // 2] ^= 1
    file.write(bytes(data))


def _parts(address: str) -> list[RemoteFile]:
    (folder,) = (child for child in RemoteFile.at(address).children() if child.name != "manifest.json")
    return [file for file in folder.children() if file.name.endswith(".distcp")]


@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_damage_is_named_with_the_newest_intact_one_beside_it(tmp_path: Path, kind: str) -> None:
    root = f"memory://{kind}"
    for number, name in enumerate(("older", "good", "bad")):
        _write(kind, float(number), f"{root}/{name}.ckpt")
    assert _value(f"{root}/bad.ckpt", tmp_path) == 2.0
    _write(kind, 3.0, f"{root}/bad.ckpt")
    assert _value(f"{root}/bad.ckpt", tmp_path) == 3.0
    bad = RemoteFile.at(f"{root}/bad.ckpt") if kind == "plain" else _parts(f"{root}/bad.ckpt")[0]
    whole = bad.read()
    for cut, words in ((False, r"differs from the saved one"), (True, r"has .* bytes")):
        bad.write(whole)
        _damaged(bad, cut)
        with pytest.raises(
            CheckpointError, match=rf"{root}/bad.ckpt is damaged: .*{words}.*beside it: {root}/good.ckpt"
        ):
            _value(f"{root}/bad.ckpt", tmp_path)
    with pytest.raises((FileNotFoundError, CheckpointError), match="none"):
        SafeCheckpointIO().load_checkpoint(f"{root}/none.ckpt")
    SafeCheckpointIO().remove_checkpoint(f"{root}/bad.ckpt")
    assert sorted(child.name for child in RemoteFile.at(root).children()) == ["good.ckpt", "older.ckpt"]


def test_addresses_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory:// is the memory of one process, and this run has 2"):
        check_address("memory://a", 2, "output")
    with pytest.raises(ConfigError, match=r"nothing can be written to http://"):
        check_address("http://a/b", 1, "output")
    check_address("http://a/b", 1, "resume", writes=False)
    with pytest.raises(ConfigError, match=r"there is no file system for nowhere:// here"):
        check_address("nowhere://a", 1, "output")
    with pytest.raises(ConfigError, match=r"pathlib has changed: pass it as a string \(s3://bucket/a\)"):
        is_remote(Path("s3://bucket/a"))
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=1), devices=1, callbacks=[ModelCheckpoint("http://a/b")], max_steps=1,
        **{**QUIET, "enable_checkpointing": True},
    )  # fmt: skip
    module, train, _ = build("gpt")
    with pytest.raises(ConfigError, match=r"ModelCheckpoint.dirpath=http://a/b"):
        trainer.fit(module, train)


def _dies(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """`kill -9` at this moment of the next save."""

    def at(place: Any, name: str, after: bool) -> None:
        own = getattr(place, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if after:
                own(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(place, name, wrapped)

    places = {
        "while writing": (torch, "save", True),
        "after the parts": (remote_shards, "sent_from", False),
        "before the copy": (RemoteFile, "send", False),
        "after the copy": (RemoteFile, "send", True),
        "before the manifest": (RemoteFile, "write", False),
        "after the manifest": (RemoteFile, "write", True),
    }
    at(*places[moment])


KILLS = {
    "plain": {"while writing": 1.0, "before the copy": 1.0, "after the copy": 2.0},
    "shards": {"after the parts": 1.0, "after the copy": 1.0, "before the manifest": 1.0, "after the manifest": 2.0},
}


def _apart(action: Callable[[], Any]) -> Any:
    """The result of an action in a process of its own: the threads of fsspec cannot be forked, so this one has none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(action()).encode())
        except BaseException:
            os.write(write, json.dumps(traceback.format_exc()[-3000:]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    return -os.WTERMSIG(os.waitpid(child, 0)[1]) if not text else json.loads(text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLS)
def test_kill_during_a_save(store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """At any moment: under the address there is the previous checkpoint, or the new one, and it is whole."""

    def killed(address: str, moment: str) -> None:
        _dies(monkeypatch, moment)
        _write(kind, 2.0, address)

    def after(address: str) -> list[float]:
        found = _value(address, tmp_path)
        _write(kind, 3.0, address)
        left = len(RemoteFile.at(address).children()) if kind == "shards" else 2
        return [found, _value(address, tmp_path), left]

    for moment, value in KILLS[kind].items():
        address = f"{BUCKET}/kills/{kind}/{moment}/last.ckpt"
        assert _apart(lambda address=address: _write(kind, 1.0, address)) is None
        assert _apart(lambda address=address, moment=moment: killed(address, moment)) == -signal.SIGKILL, moment
        assert _apart(lambda address=address: after(address)) == [value, 3.0, 2], moment


def _trained(stages: int, folder: str, epochs: int, resume: str | None, kind: str, variables: dict[str, str]) -> Any:
    os.environ.update(variables)
    module, train, _ = build("gpt")
    notes = Notes()
    saves = ModelCheckpoint(folder, filename="kept", save_last=True, every_n_epochs=1)
    strategy = PipelineStrategy(stages=stages, microbatches=3, sharded=kind == "shards")
    options = {**QUIET, "limit_val_batches": 0, "enable_checkpointing": True, "default_root_dir": folder}
    callbacks = [notes, saves, PipelineMonitor()]
    trainer = L.Trainer(strategy=strategy, devices=stages, max_epochs=epochs, callbacks=callbacks, **options)
    trainer.fit(module, train, ckpt_path=resume)
    return notes.losses, saves.last_model_path


def _broken(stages: int, address: str, variables: dict[str, str]) -> str:
    """A save of two ranks to a bucket whose name no store takes."""
    os.environ.update(variables)
    module, train, _ = build("gpt")
    options = {**QUIET, "limit_val_batches": 0}
    strategy = PipelineStrategy(stages=stages, microbatches=3, sharded=True)
    trainer = L.Trainer(strategy=strategy, devices=stages, max_steps=1, **options)
    trainer.fit(module, train)
    return error_of(trainer.save_checkpoint, address)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_ranks_save_to_a_store_and_another_shape_goes_on_from_it(store: dict[str, str], kind: str) -> None:
    folder = f"{BUCKET}/runs/{kind}"
    (first, last), _ = run_ranks(2, _trained, 2, folder, 1, None, kind, store)
    assert last == f"{folder}/last.ckpt"
    assert _apart(lambda: sharded.is_sharded(last)) == (kind == "shards")
    names = set(_apart(lambda: [child.name for child in RemoteFile.at(folder).children()]))
    assert names >= {"last.ckpt", "kept.ckpt", "plan.json", "report.html"}, names
    whole, _ = _trained(1, "memory://whole", 2, None, "plain", {})
    ((here, _),) = run_ranks(1, _trained, 1, f"{BUCKET}/runs/other", 2, last, "plain", store)
    (there, _), _ = run_ranks(2, _trained, 2, folder, 2, last, kind, store)
    assert first == pytest.approx(whole[:3], rel=1e-8)
    assert here == pytest.approx(whole[3:], rel=1e-8)
    assert there == pytest.approx(whole[3:], rel=1e-8)
    if kind == "shards":
        for text in run_ranks(2, _broken, 2, "s3://no!bucket/a.ckpt", store):
            assert "s3://no!bucket/a.ckpt could not be written" in text


def test_a_copy_of_a_file_is_gone_after_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _write("plain", 5.0, "memory://copies/a.ckpt")
    found = SafeCheckpointIO().load_checkpoint("memory://copies/a.ckpt")
    assert list(tmp_path.iterdir()) == []
    assert found["state_dict"]["weight"].sum() == 5000.0
    RemoteFile.at("memory://copies/a.ckpt").write(b"")
    (tmp_path / "a.ckpt").write_bytes(b"x")
    assert fault_of_seal(tmp_path / "a.ckpt") is None
