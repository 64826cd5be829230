"""Outputs of a network in a file, in the order of their rows: csv, jsonl, npy and safetensors; whole or not at all."""

from __future__ import annotations

import csv
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import save_file

from pipepart.errors import ConfigError, did_you_mean

__all__ = ["WRITTEN", "Writer", "check_output", "written_rows"]

WRITTEN = (".csv", ".jsonl", ".npy", ".safetensors")


class Writer(ABC):
    """Takes batches of outputs. The file has its name only after the last of them."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path, self.names = path, names
        self.rows = 0

    def add(self, outputs: Sequence[torch.Tensor], rows: int) -> None:
        """Take the outputs of so many rows."""
        for name, value in zip(self.names, outputs):
            if not value.ndim or len(value) != rows:
                raise ConfigError(
                    f"the output {name} has the shape {tuple(value.shape)} for {rows} rows: it has no row for each input"
                )
        self._take([value.detach().cpu() for value in outputs])
        self.rows += rows

    @abstractmethod
    def _take(self, outputs: list[torch.Tensor]) -> None:
        """Keep or write a batch."""

    def finish(self) -> None:  # noqa: B027  (files of lines are complete)
        """Write what was kept."""


class _Lines(Writer):
    def __init__(self, path: Path, names: Sequence[str], file: IO[str]) -> None:
        super().__init__(path, names)
        self._file, self._csv = file, csv.writer(file, lineterminator="\n")

    def _take(self, outputs: list[torch.Tensor]) -> None:
        lists = [value.tolist() for value in outputs]
        for number, row in enumerate(zip(*lists), start=self.rows + 1):
            if self.path.suffix == ".csv":
                self._csv.writerow([number for value in row for number in _flat(value)])
                continue
            try:
                self._file.write(json.dumps(dict(zip(self.names, row)), allow_nan=False) + "\n")
            except ValueError as error:
                raise ConfigError(
                    f"row {number} has a value that JSON cannot hold ({error}): write .csv, .npy or .safetensors"
                ) from error


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for inner in value:
            yield from _flat(inner)
    else:
        yield value


class _Arrays(Writer):
    def __init__(self, path: Path, names: Sequence[str], part: Path) -> None:
        super().__init__(path, names)
        self._part = part
        self._kept: list[list[torch.Tensor]] = []

    def _take(self, outputs: list[torch.Tensor]) -> None:
        self._kept.append(outputs)

    def finish(self) -> None:
        try:
            whole = {name: torch.cat(parts) for name, parts in zip(self.names, zip(*self._kept))}
        except RuntimeError as error:
            raise ConfigError(
                f"rows have outputs of different shapes, which {self.path.suffix} cannot hold ({error}): write .jsonl"
            ) from error
        if self.path.suffix == ".safetensors":
            save_file({name: value.contiguous() for name, value in whole.items()}, self._part)
            return
        try:
            with open(self._part, "wb") as file:
                np.save(file, next(iter(whole.values())).numpy(), allow_pickle=False)
        except TypeError as error:
            raise ConfigError(f"{self.path}: numpy has no such dtype ({error}): write .safetensors") from error


def check_output(path: Path, names: Sequence[str]) -> None:
    """Refuse a file that cannot be written, before anything is computed."""
    if path.suffix not in WRITTEN:
        raise ConfigError(f"{path}: outputs are written to {', '.join(WRITTEN)}; {did_you_mean(path.suffix, WRITTEN)}")
    if path.suffix in (".csv", ".npy") and len(names) > 1:
        raise ConfigError(
            f"{path}: {path.suffix} holds one output, and the network has {', '.join(names)}: use .jsonl or .safetensors"
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: expected the name of a file in a folder that exists")


@contextmanager
def written_rows(path: Path, names: Sequence[str]) -> Iterator[Writer]:
    """A writer; the file appears when the block ends without an error, and an earlier one stays otherwise."""
    check_output(path, names)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    writer: Writer
    try:
        if path.suffix in (".csv", ".jsonl"):
            with open(part, "w", newline="", encoding="utf-8") as file:
                yield (writer := _Lines(path, names, file))
        else:
            yield (writer := _Arrays(path, names, part))
        if not writer.rows:
            raise ConfigError("there are no rows to predict for")
        writer.finish()
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
