"""Checkpoints: any shape goes on where any other stopped; a crash never costs the previous one; damage is named."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from realistic import build
from support.ranks import RanksFailed, run_ranks
from watching import ONE_RANK, QUIET, Notes

from pipepart import PipelineStrategy
from pipepart.lightning import WeightEMA, checkpoint_files, sharded
from pipepart.lightning.checkpoint_files import CheckpointError, SafeCheckpointIO, manifest_of, safe_by_default, verify
from pipepart.lightning.sealed_file import fault_of_seal
from pipepart.lightning.sharded import consolidate

SHAPES = {"1": (1, 1), "2x1": (2, 2), "3x1": (3, 3), "2x2": (2, 4)}
"""Name -> stages, devices."""


def _run(shape: str, folder: str, epochs: int, resume: str | None, save: str | None, **options: Any) -> dict[str, Any]:
    """Train the language model (AdamW, decay groups, tied weights) up to some epoch."""
    stages, devices = SHAPES[shape]
    module, train, _ = build("gpt")
    notes = Notes()
    strategy = PipelineStrategy(stages=stages, microbatches=3, sharded=options.pop("sharded", False))
    callbacks = [notes, *options.pop("callbacks", [])]
    options = {**QUIET, "default_root_dir": folder, "limit_val_batches": 0, **options}
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=epochs, callbacks=callbacks, **options)
    trainer.fit(module, train, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {"losses": notes.losses, "rates": notes.rates, "step": trainer.global_step}


def _resume_all(shape: str, folder: str, resumes: list[str]) -> list[dict[str, Any]]:
    """Resume from each in turn, with one trainer: every checkpoint replaces all that the one before has left."""
    stages, devices = SHAPES[shape]
    module, train, _ = build("gpt")
    notes, found = Notes(), []
    options = {**QUIET, "default_root_dir": folder, "limit_val_batches": 0, "callbacks": [notes], "max_epochs": 2}
    trainer = L.Trainer(strategy=PipelineStrategy(stages=stages, microbatches=3), devices=devices, **options)
    for path in resumes:
        notes.losses, notes.rates = [], []
        trainer.fit(module, train, ckpt_path=path)
        found.append({"losses": notes.losses, "rates": notes.rates, "step": trainer.global_step})
    return found


def _on(shape: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run on as many processes as the shape needs; one device is this process."""
    devices = SHAPES[shape][1]
    if devices == 1:
        return function(shape, *args, **kwargs)
    return run_ranks(devices, function, shape, *args, **kwargs)[0]


@pytest.mark.slow
def test_resume_matrix(tmp_path) -> None:
    """16 pairs of shapes: the losses after the resume are those of an uninterrupted run."""
    paths = {shape: str(tmp_path / f"{shape}.ckpt") for shape in SHAPES}
    for shape, path in paths.items():
        _on(shape, _run, str(tmp_path), 1, None, path)
    whole = _run("1", str(tmp_path), 2, None, None)
    for shape in SHAPES:
        for source, answer in zip(paths, _on(shape, _resume_all, str(tmp_path), list(paths.values()))):
            assert answer["losses"] == pytest.approx(whole["losses"][3:], rel=1e-8), f"{source} -> {shape}"
            assert answer["rates"] == whole["rates"][3:], f"{source} -> {shape}"
            assert answer["step"] == whole["step"]


def _sharded(shape: str, folder: str) -> list[Any]:
    path = f"{folder}/shards.ckpt"
    first = _run(shape, folder, 1, None, path, sharded=True)
    again = _run(shape, folder, 1, None, path, sharded=True)  # over the first one
    resumed = _run(shape, folder, 2, path, None, sharded=True)
    return [first, again, resumed]


@pytest.mark.slow
def test_the_kind_of_checkpoint_can_be_changed_after_a_run(tmp_path) -> None:
    """`strategy.sharded` counts at the time of the checkpoint, as `WeightEMA` reads it."""
    module, train, _ = build("gpt")
    options = {**QUIET, "default_root_dir": tmp_path, "limit_val_batches": 0, "max_steps": 1}
    trainer = L.Trainer(strategy=PipelineStrategy(stages=1, microbatches=3), devices=1, **options)
    trainer.fit(module, train)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    trainer.strategy.sharded = True
    trainer.save_checkpoint(tmp_path / "shards.ckpt")
    assert (tmp_path / "plain.ckpt").is_file()
    assert sharded.is_sharded(tmp_path / "shards.ckpt")


@pytest.mark.slow
def test_sharded_checkpoint_resumes_at_another_shape_and_becomes_plain(tmp_path) -> None:
    *_, resumed = _on("2x1", _sharded, str(tmp_path))
    whole = _run("1", str(tmp_path), 2, None, None)
    assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=1e-8)
    folder = tmp_path / "shards.ckpt"
    assert len(list(folder.glob("*.distcp"))) == 2, "each stage writes its part"
    here = _run("1", str(tmp_path), 2, str(folder), None)
    assert here["losses"] == pytest.approx(whole["losses"][3:], rel=1e-8)
    consolidate(folder, tmp_path / "plain.ckpt")
    plain = _run("1", str(tmp_path), 2, str(tmp_path / "plain.ckpt"), None)
    assert plain["losses"] == pytest.approx(whole["losses"][3:], rel=1e-8)
    shutil.copytree(folder, tmp_path / "intact.ckpt")
    shard, *_ = sorted(folder.glob("*.distcp"))
    _flip(shard)
    with pytest.raises(CheckpointError, match=f"{shard.name} differs from the saved one.*beside it: .*plain.ckpt"):
        _run("1", str(tmp_path), 2, str(folder), None)  # a file and a directory are checkpoints alike: the newest one
    (tmp_path / "plain.ckpt").unlink()
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"{shard.name} has .* bytes, and .* were written.*intact.ckpt"):
        _run("1", str(tmp_path), 2, str(folder), None)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


# ---- damage


def _content(value: float) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((1000,), value)}, "epoch": 1}


def test_truncated_and_flipped_files_are_named(tmp_path) -> None:
    io = SafeCheckpointIO()
    good, cut, flipped = (tmp_path / f"{name}.ckpt" for name in ("good", "cut", "flipped"))
    for path in (good, cut, flipped):
        io.save_checkpoint(_content(1.0), path)
        verify(path)
    _flip(flipped)
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=rf"{cut.name} is damaged: it has .* bytes, and its end is missing.*{good.name}"
    ):
        verify(cut)
    with pytest.raises(CheckpointError, match=f"{cut.name} cannot be read"):
        io.load_checkpoint(cut)
    with pytest.raises(CheckpointError, match=f"{flipped.name} is damaged: its content differs from the saved one"):
        verify(flipped)
    io.remove_checkpoint(good)
    assert not good.exists()


def _as_before(path: Path) -> dict[str, Any]:
    """The manifest in the form that it had when files and directories had forms of their own."""
    files = json.loads(manifest_of(path).read_text())["files"]
    if path.is_dir():
        return {name: content for name, (content,) in files.items()}
    return {"file": path.name, "contents": files[path.name]}


@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_manifests_written_before_are_read(tmp_path, kind: str) -> None:
    path, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    for one in (path, other):
        if kind == "plain":
            torch.save(_content(1.0), one)
            checkpoint_files.write_manifest(one, {one.name: [checkpoint_files.Content.of(one)]})
        else:
            _shards(1.0, one)
        manifest_of(one).write_text(json.dumps(_as_before(one)))
        assert _value(one) == 1.0
    file = path if kind == "plain" else path / "rest.pt"
    _flip(file)
    with pytest.raises(CheckpointError, match=r"damaged: .*content.* differs from the saved one.*(other|whole).ckpt"):
        _value(path)
    manifest_of(path).write_text("[]")
    if kind == "plain":  # as a file from elsewhere
        verify(path)
    else:
        with pytest.raises(CheckpointError, match=r"no readable manifest\.json"):
            sharded.verify_shards(path)


@contextmanager
def _room_for(size: int) -> Iterator[None]:
    """Files cannot grow beyond this size: the system refuses to write more, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_leaves_the_previous_one(tmp_path) -> None:
    io, path = SafeCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint(_content(1.0), path)
    with _room_for(2000), pytest.raises(CheckpointError, match=r"last.ckpt could not be written: .*untouched"):
        io.save_checkpoint(_content(2.0), path)
    verify(path)
    assert io.load_checkpoint(path)["state_dict"]["weight"][0] == 1.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt"]


def test_the_reason_of_a_failed_write() -> None:
    """torch raises an error of its own if a file takes fewer bytes than the archive has; where, depends on the sizes."""
    told = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert checkpoint_files.reason_of(told).startswith(
        "the disk is full, or the file is larger than allowed (torch: [enforce"
    )
    told.__context__ = OSError(27, "File too large")
    assert checkpoint_files.reason_of(told) == f"[Errno 27] File too large (torch: {told})"
    assert checkpoint_files.reason_of(told.__context__) == "[Errno 27] File too large"
    assert checkpoint_files.reason_of(RuntimeError("no such storage")) == "no such storage"


def _shards(value: float, path: Path) -> None:
    sharded.save(
        _content(value),
        path,
        ONE_RANK,
        lambda step: step(),
    )


def _value(path: Path) -> float:
    """What is in a checkpoint of either kind, after it was held against its digests."""
    if not sharded.is_sharded(path):
        verify(path)
        return float(SafeCheckpointIO().load_checkpoint(path)["state_dict"]["weight"][0])
    sharded.verify_shards(path)
    consolidate(path, path.with_name("whole.ckpt"))
    return _value(path.with_name("whole.ckpt"))


def _dies(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """`kill -9` at this moment of the next save."""

    def at(place: Any, name: str, when: Callable[..., bool] = lambda *args: True, after: bool = False) -> None:
        own = getattr(place, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            answer = own(*args, **kwargs) if after or not when(*args) else None
            if when(*args):
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        monkeypatch.setattr(place, name, wrapped)

    if moment == "while writing":
        at(torch, "save", after=True)
    elif moment == "before the rename":
        at(os, "replace", lambda a, b: str(b).endswith(".ckpt"))
        monkeypatch.setattr(sharded, "_exchange", lambda a, b: os.kill(os.getpid(), signal.SIGKILL))
    elif moment == "between the renames":  # on a system that cannot exchange two names in one step
        monkeypatch.setattr(sharded, "_exchange", lambda a, b: False)
        at(os, "replace", lambda a, b: str(a).endswith(".ckpt.part"))
    else:
        at(checkpoint_files, "_sync_directory", after=True)
        at(shutil, "rmtree", lambda path, **kwargs: str(path).endswith(".part") and sharded.is_sharded(path))


KILLS = {
    "plain": {"while writing": 1.0, "before the rename": 1.0, "after the rename": 2.0},
    "shards": {"while writing": 1.0, "before the rename": 1.0, "between the renames": 1.0, "after the rename": 2.0},
}


@pytest.mark.parametrize("kind", KILLS)
def test_kill_during_a_save(tmp_path, monkeypatch, kind: str) -> None:
    """At any moment: under the name there is the previous checkpoint, or the new one, and it is whole."""
    write = (
        (lambda value, path: SafeCheckpointIO().save_checkpoint(_content(value), path)) if kind == "plain" else _shards
    )
    for moment, value in KILLS[kind].items():
        path = tmp_path / moment / "last.ckpt"
        write(1.0, path)
        child = os.fork()
        if child == 0:
            _dies(monkeypatch, moment)
            write(2.0, path)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, moment
        sharded.bring_back(path)
        assert _value(path) == value, moment
        write(3.0, path)
        assert _value(path) == 3.0, moment
        assert not list(path.parent.glob("*.part"))
        assert not list(path.parent.glob("*.old"))


def _broken_saves(shape: str, folder: str) -> list[str]:
    """Shards of two ranks: a disk that is full for one of them, a place that cannot be written to."""
    found = []
    path = f"{folder}/shards.ckpt"
    stages, devices = SHAPES[shape]
    module, train, _ = build("gpt")
    trainer = L.Trainer(
        strategy=PipelineStrategy(stages=stages, microbatches=3, sharded=True), devices=devices, max_steps=1, **QUIET
    )
    trainer.fit(module, train)
    trainer.save_checkpoint(path)
    for room, target in ((4000, path), (None, "/proc/nowhere/a.ckpt")):
        with _room_for(room) if room and trainer.global_rank == 1 else nullcontext():
            try:
                trainer.save_checkpoint(target)
                found.append("nothing raised")
            except CheckpointError as error:
                found.append(str(error))
    trainer.strategy.barrier()
    sharded.verify_shards(path)
    return found


@pytest.mark.slow
def test_shards_on_a_full_disk(tmp_path) -> None:
    for full, nowhere in run_ranks(2, _broken_saves, "2x1", str(tmp_path)):
        assert re.search(r"shards.ckpt could not be written: .*(File too large|disk is full).*untouched", full), full
        assert "/proc/nowhere/a.ckpt could not be written" in nowhere
    assert [p.name for p in tmp_path.iterdir()] == ["shards.ckpt"]


def _killed_rank(shape: str, folder: str) -> None:
    path = f"{folder}/shards.ckpt"
    _run(shape, folder, 1, None, path, sharded=True)
    if torch.distributed.get_rank() == 1:
        own = sharded.write_tensors
        sharded.write_tensors = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL) or own  # type: ignore
    _run(shape, folder, 1, None, path, sharded=True)


@pytest.mark.slow
def test_kill_of_one_rank_while_all_save_shards(tmp_path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 died, exit code -9"):
        run_ranks(2, _killed_rank, "2x1", str(tmp_path))
    sharded.verify_shards(tmp_path / "shards.ckpt")
    assert len(_run("1", str(tmp_path), 2, str(tmp_path / "shards.ckpt"), None)["losses"]) == 3


def _damaged_resume(shape: str, folder: str) -> str:
    path = f"{folder}/a.ckpt"
    _run(shape, folder, 1, None, path)
    if torch.distributed.get_rank() == 0:
        _flip(Path(path))
    torch.distributed.barrier()
    try:
        _run(shape, folder, 2, path, None)
    except CheckpointError as error:
        return str(error)
    return "nothing raised"


def _unwritable(shape: str, folder: str) -> str:
    try:
        _run(shape, folder, 1, None, "/proc/nowhere/a.ckpt")
    except CheckpointError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.slow
def test_all_ranks_raise_what_one_found(tmp_path) -> None:
    for text in run_ranks(2, _damaged_resume, "2x1", str(tmp_path)):
        assert "a.ckpt is damaged: its content differs from the saved one" in text
    for text in run_ranks(2, _unwritable, "2x1", str(tmp_path)):
        assert "/proc/nowhere/a.ckpt could not be written" in text


def _asynchronous(shape: str, folder: str) -> None:
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    options = {"plugins": [AsyncCheckpointIO()], "enable_checkpointing": True, "callbacks": [checkpoint]}
    _run(shape, folder, 2, None, None, **options)


@pytest.mark.slow
def test_asynchronous_saving(tmp_path) -> None:
    run_ranks(2, _asynchronous, "2x1", str(tmp_path))
    for path in (tmp_path / "epoch=0.ckpt", tmp_path / "epoch=1.ckpt"):
        assert fault_of_seal(path) == ""
        build("gpt")[0].load_state_dict(torch.load(path, weights_only=True)["state_dict"])


# ---- the moving average


def test_a_plugin_that_wraps_another_gets_the_default_one_inside() -> None:
    inner = AsyncCheckpointIO()
    outer = AsyncCheckpointIO(inner)
    assert safe_by_default(outer) is outer
    assert outer.checkpoint_io is inner
    assert isinstance(inner.checkpoint_io, SafeCheckpointIO)


def _average(shape: str, folder: str, resume: str | None) -> tuple[Any, Any]:
    ema = WeightEMA(decay=0.5)
    path = f"{folder}/ema-{shape}-{2 if resume else 1}.ckpt"
    _run(shape, folder, 2 if resume else 1, resume, path, callbacks=[ema])
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    content = torch.load(path, weights_only=True)
    return content["pipepart_weight_ema"]["average"], content["state_dict"]


@pytest.mark.slow
def test_weight_ema_equals_one_device_and_resumes(tmp_path) -> None:
    got, state = _on("2x1", _average, str(tmp_path), None)
    wanted, _ = _average("1", str(tmp_path), None)
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-10), name
        assert not torch.equal(got[name], state[name]), name
    on, _ = _average("1", str(tmp_path), str(tmp_path / "ema-2x1-1.ckpt"))
    straight, _ = _on("2x1", _average, str(tmp_path), str(tmp_path / "ema-1-1.ckpt"))
    assert set(on) == set(straight) == set(wanted)
    for name, value in on.items():
        assert torch.allclose(value, straight[name], rtol=1e-9, atol=1e-10), name
        assert not torch.equal(value, wanted[name]), name
