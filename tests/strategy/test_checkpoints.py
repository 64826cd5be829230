"""Checkpoints: any shape goes on where any other stopped; a crash never costs the previous one; damage is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from realistic import build
from support.ranks import run_ranks
from watching import QUIET, Notes

from pipepart import PipelineStrategy
from pipepart.strategy import WeightEMA
from pipepart.strategy.checkpoint_io import CheckpointError, SafeCheckpointIO, manifest_of, verify
from pipepart.strategy.sharded import consolidate

SHAPES = {"1": (1, 1), "2x1": (2, 2), "3x1": (3, 3), "2x2": (2, 4)}
"""Name -> stages, devices."""


def _run(shape: str, folder: str, epochs: int, resume: str | None, save: str | None, **options: Any) -> dict[str, Any]:
    """Train the language model (AdamW, decay groups, tied weights) up to some epoch."""
    stages, devices = SHAPES[shape]
    module, train, _ = build("gpt")
    notes = Notes()
    sharded = options.pop("sharded", False)
    strategy = PipelineStrategy(stages=stages, microbatches=3, sharded=sharded)
    callbacks = [notes, *options.pop("callbacks", [])]
    options = {**QUIET, "default_root_dir": folder, "limit_val_batches": 0, **options}
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=epochs, callbacks=callbacks, **options)
    trainer.fit(module, train, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {"losses": notes.losses, "rates": notes.rates, "step": trainer.global_step}


def _save_and_resume(shape: str, folder: str, resumes: list[str]) -> list[dict[str, Any]]:
    return [_run(shape, folder, 2, path, None) for path in resumes]


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
        for source, answer in zip(paths, _on(shape, _save_and_resume, str(tmp_path), list(paths.values()))):
            assert answer["losses"] == pytest.approx(whole["losses"][3:], rel=3e-5), f"{source} -> {shape}"
            assert answer["rates"] == whole["rates"][3:], f"{source} -> {shape}"
            assert answer["step"] == whole["step"]


def _sharded(shape: str, folder: str) -> list[Any]:
    path = f"{folder}/shards.ckpt"
    first = _run(shape, folder, 1, None, path, sharded=True)
    again = _run(shape, folder, 1, None, path, sharded=True)  # over the first one
    resumed = _run(shape, folder, 2, path, None, sharded=True)
    return [first, again, resumed]


def test_sharded_checkpoint_resumes_at_another_shape_and_becomes_plain(tmp_path) -> None:
    *_, resumed = _on("2x1", _sharded, str(tmp_path))
    whole = _run("1", str(tmp_path), 2, None, None)
    assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=3e-5)
    folder = tmp_path / "shards.ckpt"
    assert len(list(folder.glob("*.distcp"))) == 2, "each stage writes its part"
    here = _run("1", str(tmp_path), 2, str(folder), None)
    assert here["losses"] == pytest.approx(whole["losses"][3:], rel=3e-5)
    consolidate(folder, tmp_path / "plain.ckpt")
    plain = _run("1", str(tmp_path), 2, str(tmp_path / "plain.ckpt"), None)
    assert plain["losses"] == pytest.approx(whole["losses"][3:], rel=3e-5)
    shard = next(folder.glob("*.distcp"))
    _flip(shard)
    with pytest.raises(CheckpointError, match=f"{shard.name} is not what was written"):
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
        CheckpointError, match=rf"{cut.name} is damaged: it has .* bytes, and .* were written.*{good.name}"
    ):
        verify(cut)
    with pytest.raises(CheckpointError, match=f"{cut.name} cannot be read"):
        io.load_checkpoint(cut)
    with pytest.raises(CheckpointError, match=f"{flipped.name} is damaged: its content is not what was written"):
        verify(flipped)
    io.remove_checkpoint(good)
    assert not good.exists()
    assert not manifest_of(good).exists()


def test_full_disk_leaves_the_previous_one(tmp_path, monkeypatch) -> None:
    io, path = SafeCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint(_content(1.0), path)
    own = torch.save

    def full(value, file):
        own(value, file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"last.ckpt could not be written: .*No space left.*untouched"):
        io.save_checkpoint(_content(2.0), path)
    verify(path)
    assert io.load_checkpoint(path)["state_dict"]["weight"][0] == 1.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "last.ckpt.sha256"]


_KILLED = """
import os, signal, sys, torch
from pipepart.strategy.checkpoint_io import SafeCheckpointIO
import pipepart.strategy.checkpoint_io as module
io, path, moment = SafeCheckpointIO(), sys.argv[1], sys.argv[2]
state = lambda value: {"state_dict": {"weight": torch.full((1000,), value)}}
io.save_checkpoint(state(1.0), path)
die = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
if moment == "while writing":
    own = torch.save
    torch.save = lambda value, file: (own(value, file), file.flush(), die())
elif moment == "before the rename":
    own_replace = os.replace
    os.replace = lambda a, b: die() if str(b).endswith(".ckpt") else own_replace(a, b)
else:
    count = [0]
    own_write = module._write_manifest
    module._write_manifest = lambda *args: (count.append(0), die() if len(count) == 3 else own_write(*args))
io.save_checkpoint(state(2.0), path)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "value"), [("while writing", 1.0), ("before the rename", 1.0), ("after the rename", 2.0)]
)
def test_kill_during_a_save(tmp_path, moment: str, value: float) -> None:
    path = tmp_path / "last.ckpt"
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path), moment], timeout=100, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    verify(path)
    assert SafeCheckpointIO().load_checkpoint(path)["state_dict"]["weight"][0] == value
    SafeCheckpointIO().save_checkpoint(_content(3.0), path)
    verify(path)
    assert not list(tmp_path.glob("*.part"))


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


def test_all_ranks_raise_what_one_found(tmp_path) -> None:
    for text in run_ranks(2, _damaged_resume, "2x1", str(tmp_path)):
        assert "a.ckpt is damaged: its content is not what was written" in text
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
        assert manifest_of(path).exists()
        verify(path)
        build("gpt")[0].load_state_dict(torch.load(path, weights_only=True)["state_dict"])


# ---- the moving average


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
        assert torch.allclose(got[name], value, atol=1e-5), name
        assert not torch.equal(got[name], state[name]), name
    on, _ = _average("1", str(tmp_path), str(tmp_path / "ema-2x1-1.ckpt"))
    straight, _ = _on("2x1", _average, str(tmp_path), str(tmp_path / "ema-1-1.ckpt"))
    assert set(on) == set(straight) == set(wanted)
    for name, value in on.items():
        assert torch.allclose(value, straight[name], atol=1e-4), name
        assert not torch.equal(value, wanted[name]), name
