"""Checkpoints that somebody else has written: reading them runs no code, and the refusal names the class."""

from __future__ import annotations

import inspect
import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.lightning_modules import Module, loader
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorProperties
from watching import ONE_RANK, QUIET

from pipepart import PipelineStrategy
from pipepart.lightning import sharded
from pipepart.lightning.checkpoint_files import CheckpointError, Content, SafeCheckpointIO, write_manifest
from pipepart.lightning.shard_index import ShardReader
from pipepart.lightning.sharded import consolidate


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def _shards(path: Path, **more: Any) -> Path:
    content = {"state_dict": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}, "epoch": 1, **more}
    sharded.save(content, path, ONE_RANK, lambda step: step())
    return path


def _signed(folder: Path) -> None:
    """Write the manifest again, as an attacker would."""
    files = [file for file in sorted(folder.iterdir()) if file.name != "manifest.json"]
    write_manifest(folder, {file.name: [Content.of(file)] for file in files})


def _trainer(folder: Path) -> L.Trainer:
    return L.Trainer(
        strategy=PipelineStrategy(stages=1, microbatches=2, sharded=True),
        devices=1,
        max_steps=1,
        default_root_dir=folder,
        **QUIET,
    )


def _data() -> Any:
    return loader("gpt", 4, 4)


@pytest.mark.parametrize("file", [".metadata", "rest.pt"])
def test_planted_code_does_not_run(tmp_path, file: str) -> None:
    mark, folder = tmp_path / "ran", tmp_path / "a.ckpt"
    trainer, module = _trainer(tmp_path), Module()
    trainer.fit(module, _data())
    trainer.save_checkpoint(folder)
    if file == ".metadata":
        (folder / file).write_bytes(pickle.dumps(Runs(mark)))
    else:
        torch.save({"epoch": Runs(mark)}, folder / file)
    _signed(folder)
    with pytest.raises(CheckpointError, match=r"(?s)a.ckpt.* is refused.*posix.system"):
        consolidate(folder, tmp_path / "b.ckpt")
    takes = "weights_only" in inspect.signature(L.Trainer.fit).parameters  # from Lightning 2.6 on
    for asked in ({}, {"weights_only": None}, {"weights_only": True})[: 3 if takes else 1]:
        with pytest.raises(CheckpointError, match=r"(?s)is refused.*posix.system"):
            _trainer(tmp_path).fit(Module(), _data(), ckpt_path=str(folder), **asked)
    assert not mark.exists()
    assert not (tmp_path / "b.ckpt").exists()


class Own:
    """A class of the user."""


def test_own_classes_need_consent(tmp_path) -> None:
    folder, plain = _shards(tmp_path / "a.ckpt", hyper_parameters={"own": Own()}), tmp_path / "plain.ckpt"
    for weights_only in (None, True):
        with pytest.raises(CheckpointError, match=r"(?s)test_untrusted_checkpoints.Own.*do: .*weights_only=False"):
            sharded.load_rest(folder, weights_only)
    with pytest.raises(CheckpointError, match=r"test_untrusted_checkpoints.Own"):
        consolidate(folder, plain)
    consolidate(folder, plain, weights_only=False)
    with pytest.raises(CheckpointError, match=r"(?s)plain.ckpt is refused.*Own.*do: "):
        SafeCheckpointIO().load_checkpoint(plain)
    assert isinstance(SafeCheckpointIO().load_checkpoint(plain, weights_only=False)["hyper_parameters"]["own"], Own)


def _index(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()  # written by this test


def test_index_is_read_as_torch_reads_it(tmp_path) -> None:
    folder = _shards(tmp_path / "a.ckpt")
    got, wanted = ShardReader(folder).read_metadata(), _index(folder)
    assert got.state_dict_metadata == wanted.state_dict_metadata
    assert got.storage_data == wanted.storage_data
    assert got.version == wanted.version


def _as_bytes(index: Metadata) -> None:
    index.state_dict_metadata["model.weight"] = BytesStorageMetadata()  # torch reads such entries with pickle


def _outside(index: Metadata) -> None:
    for entry in index.storage_data.values():
        entry.relative_path = "../other/__0_0.distcp"


def _no_dtype(index: Metadata) -> None:
    index.state_dict_metadata["model.weight"].properties.dtype = "float32"


def _negative(index: Metadata) -> None:
    for entry in index.storage_data.values():
        entry.offset = -1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_as_bytes, "a BytesStorageMetadata in the place of a TensorStorageMetadata"),
        (_outside, "expected a file inside the checkpoint"),
        (_no_dtype, "model.weight has no dtype"),
        (_negative, "not numbers of elements or bytes"),
    ],
)
def test_index_with_wrong_values(tmp_path, change, text: str) -> None:
    folder = _shards(tmp_path / "a.ckpt")
    index = _index(folder)
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=f"a.ckpt cannot be read: its index .metadata is not valid: .*{text}"):
        ShardReader(folder).read_metadata()


@pytest.mark.parametrize("value", [Namespace(a=1), TensorProperties.create_from_tensor, [], b"no pickle"])
def test_index_of_other_objects(tmp_path, value: Any) -> None:
    (tmp_path / ".metadata").write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
    with pytest.raises(CheckpointError, match=r"its index .metadata (names (argparse|builtins|torch)|is not valid)"):
        ShardReader(tmp_path).read_metadata()


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "[" * 100_000, '{"files": {"../a": [{"bytes": 1, "sha256": "x"}]}}', '{"files": {"rest.pt": []}}',
     '{"files": {"rest.pt": [{"bytes": -1, "sha256": "x"}]}}', '{"files": {"rest.pt": [{"bytes": 1, "sha256": 3}]}}'],
)  # fmt: skip
def test_manifest_of_any_text(tmp_path, text: str) -> None:
    folder = _shards(tmp_path / "a.ckpt")
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"a.ckpt is damaged: no readable manifest.json \(.*manifest.json"):
        sharded.verify_shards(folder)
