"""The digest of a checkpoint file is inside it: every reader skips it, nothing else lies beside it, damage is found."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.lightning.checkpoint_files import CheckpointError, Content, SafeCheckpointIO, verify, write_manifest
from pipepart.lightning.sealed_file import fault_of_seal


def _content(value: float) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((50,), value)}, "epoch": 1}


def test_readers_of_plain_files_skip_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    SafeCheckpointIO().save_checkpoint(_content(2.0), path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]
    assert fault_of_seal(path) == ""
    for options in ({"mmap": True}, {"mmap": False}):
        assert torch.load(path, weights_only=True, **options)["state_dict"]["weight"][49] == 2.0
    with open(path, "rb") as file:
        assert torch.load(file, weights_only=True)["epoch"] == 1
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """Except in the words before the digest, where the content is intact."""
    path = tmp_path / "a.ckpt"
    SafeCheckpointIO().save_checkpoint(_content(2.0), path)
    whole = path.read_bytes()
    comment = len(b"pipepart sha256 ") + 64
    places = [
        *range(0, len(whole) - comment, 61),
        *range(len(whole) - comment - 24, len(whole) - comment),
        len(whole) - 1,
    ]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"damaged: its content differs from the saved one"):
            verify(path)
    for size in range(len(whole) - comment - 22, 100, -37):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"damaged: it has .* bytes, and its end is missing"):
            verify(path)


def test_files_of_others_and_of_earlier_versions(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(_content(1.0), path)
    verify(path)
    write_manifest(path, {path.name: [Content.of(path)]})
    torch.save(_content(3.0), path)
    with pytest.raises(CheckpointError, match=r"differs from the saved one.*remove a\.ckpt\.sha256"):
        verify(path)
    SafeCheckpointIO().save_checkpoint(_content(2.0), path)
    verify(path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"], "the manifest of the file before"


def test_a_requeue_finds_the_newest_file(tmp_path: Path) -> None:
    """Lightning takes all digits after `hpc_ckpt_` in the names of a folder as the number of a version."""
    trainer = L.Trainer(strategy=PipelineStrategy(stages=1), default_root_dir=tmp_path, **QUIET)
    connector = trainer._checkpoint_connector
    for version in (1, 2):
        path = connector.hpc_save_path(str(tmp_path))
        assert path == str(tmp_path / f"hpc_ckpt_{version}.ckpt")
        trainer.strategy.checkpoint_io.save_checkpoint(_content(float(version)), path)
        assert connector._hpc_resume_path == path
