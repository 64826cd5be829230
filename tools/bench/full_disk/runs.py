"""Runs of `pipepart train` in one process each, in which a chosen write is the first that fails.

Python's audit events tell when a file below the output folder is opened for writing. From the chosen one on, no file can
grow: by a limit of the system (`RLIMIT_FSIZE`), or because the disk is filled. Nothing of torch, Lightning or pipepart is
replaced.
"""

from __future__ import annotations

import os
import resource
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "fill_disk", "forbid_growth", "loaded_step", "train"]

_WORDS = (
    "recipe=mlp", "devices=1", "strategy.stages=1", "logger=csv", "trainer.max_steps=6", "trainer.limit_val_batches=1",
    "trainer.val_check_interval=2",
)  # fmt: skip
_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "full-disk",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its exit code, its output, and the files that it opened for writing, in order."""

    code: int
    output: str
    writes: tuple[str, ...]


def forbid_growth(folder: Path) -> None:
    """Let every write of this process to a file fail from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fill_disk(folder: Path) -> None:
    """Fill the disk of the folder."""
    handle = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 1 << 12, 1):
        with suppress(OSError):
            while os.write(handle, b"\0" * size):
                pass
    os.close(handle)


def train(folder: Path, first: int | None = None, full: Callable[[Path], None] = forbid_growth) -> Outcome:
    """Train a small recipe in a child of this process; writing fails from the write with the index `first` on."""
    from pipepart.cli import fit, main  # noqa: F401  # imported once, for all children

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _be_a_run(folder, first, full, write)
    os.close(write)
    with open(read, errors="replace") as stream:
        text = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for reason in folder.glob("logs/failure-rank*.json"):  # which the parent of ranks shows
        text += reason.read_text()
    lines = text.splitlines()
    writes = tuple(line.removeprefix(_MARK) for line in lines if line.startswith(_MARK))
    return Outcome(code, "\n".join(line for line in lines if not line.startswith(_MARK)), writes)


_MARK = "write: "


def _be_a_run(folder: Path, first: int | None, full: Callable[[Path], None], pipe: int) -> None:
    from pipepart.cli.main import main

    for stream in (1, 2):
        os.dup2(pipe, stream)
    os.environ.update(_RANK)
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event != "open" or not isinstance(args[0], (str, bytes, os.PathLike)) or not args[2]:
            return
        path = os.fsdecode(args[0])
        if not args[2] & (os.O_WRONLY | os.O_RDWR) or not path.startswith(str(folder)) or path.endswith("filler"):
            return
        seen += 1
        os.write(pipe, f"{_MARK}{os.path.relpath(path, folder)}\n".encode())
        if first is not None and seen == first + 1:
            full(folder)

    sys.addaudithook(hook)
    code = 1
    try:
        code = main(["train", *_WORDS, f"output={folder}"])
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def loaded_step(folder: Path) -> int:
    """Check the last checkpoint of a run against its digest, load it, and return its step."""
    from pipepart.lightning.checkpoint_files import SafeCheckpointIO, verify

    path = folder / "checkpoints" / "last.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verify(path)
        content = SafeCheckpointIO().load_checkpoint(path, weights_only=True)
    assert content["state_dict"], path
    return int(content["global_step"])
