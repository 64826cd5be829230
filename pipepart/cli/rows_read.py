"""Inputs of a network from a file, in batches and in the order of its rows: csv, jsonl, npy and safetensors."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from pipepart.errors import ConfigError, did_you_mean
from pipepart.export import Network
from pipepart.values import shortened

__all__ = ["READ", "Input", "inputs_of", "read_batches"]

READ = (".csv", ".jsonl", ".npy", ".safetensors")
Row = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Input:
    """One input of a network: a row of it has this dtype, and in the example this shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def inputs_of(network: Network) -> tuple[Input, ...]:
    """The inputs that a file must have. All of them must have rows."""
    for name, value, batched in zip(network.inputs, network.example, network.batched):
        if not batched:
            raise ConfigError(
                f"the input {name} of {type(network.module).__name__} has the shape {tuple(value.shape)} and no rows, so a "
                "file of rows cannot hold it"
            )
    return tuple(
        Input(name, value.dtype, tuple(value.shape[1:])) for name, value in zip(network.inputs, network.example)
    )


def read_batches(path: Path, inputs: Sequence[Input], size: int) -> Iterator[Row]:
    """Batches of at most `size` rows. Neighbouring rows of different shapes are in different batches."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path} to predict for")
    if path.suffix not in READ:
        raise ConfigError(f"{path}: inputs are read from {', '.join(READ)}; {did_you_mean(path.suffix, READ)}")
    if path.suffix in (".npy", ".safetensors"):
        yield from _arrays(path, inputs, size)
        return
    rows = _csv_rows(path, inputs) if path.suffix == ".csv" else _json_rows(path, inputs)
    waiting: list[Row] = []
    for row in rows:
        if waiting and (len(waiting) == size or [v.shape for v in row] != [v.shape for v in waiting[0]]):
            yield tuple(torch.stack(values) for values in zip(*waiting))
            waiting = []
        waiting.append(row)
    if waiting:
        yield tuple(torch.stack(values) for values in zip(*waiting))


# ---- files of arrays: the first dimension is that of the rows


def _arrays(path: Path, inputs: Sequence[Input], size: int) -> Iterator[Row]:
    found = _array_file(path, inputs)
    counts = {given.name: len(found[given.name]) if found[given.name].ndim else 0 for given in inputs}
    if len(set(counts.values())) > 1:
        raise ConfigError(f"{path}: the inputs have different numbers of rows: {counts}")
    for given in inputs:
        _check_dimensions(found[given.name].ndim - 1, given, f"{path}: {given.name}")
    arrays = [_typed(found[given.name], given, f"{path}: {given.name}") for given in inputs]
    for start in range(0, next(iter(counts.values())), size):
        yield tuple(array[start : start + size] for array in arrays)


def _array_file(path: Path, inputs: Sequence[Input]) -> Mapping[str, torch.Tensor]:
    try:
        if path.suffix == ".npy":
            _only_one(path, inputs)
            return {inputs[0].name: torch.from_numpy(np.load(path, allow_pickle=False))}
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if len(inputs) == len(names) == 1:
                return {inputs[0].name: file.get_tensor(next(iter(names)))}
            _check_names(str(path), names, inputs)
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError, EOFError, MemoryError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


# ---- files of lines


def _csv_rows(path: Path, inputs: Sequence[Input]) -> Iterator[Row]:
    """A line per row: its numbers, in the shape of the example if that has as many. A first line of names is skipped."""
    _only_one(path, inputs)
    (given,) = inputs
    try:
        with open(path, newline="", encoding="utf-8") as file:
            for number, cells in enumerate(csv.reader(file), start=1):
                if not cells or (number == 1 and not any(map(_is_number, cells))):
                    continue
                yield (_shaped(_csv_numbers(cells, f"{path}, line {number}"), given, f"{path}, line {number}"),)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _csv_numbers(cells: Sequence[str], where: str) -> list[float | int]:
    found: list[float | int] = []
    for cell in cells:
        try:
            found.append(int(cell) if cell.strip().lstrip("+-").isdigit() else float(cell))
        except ValueError as error:
            raise ConfigError(f"{where}: {shortened(cell)} is not a number") from error
    return found


def _shaped(values: Sequence[Any], given: Input, where: str) -> torch.Tensor:
    row = _made(values, given, where)
    if row.numel() == torch.Size(given.shape).numel():
        return row.reshape(given.shape)
    if len(given.shape) == 1:
        return row
    raise ConfigError(f"{where} has {row.numel()} numbers; a row of {given.name} has the shape {given.shape}")


def _json_rows(path: Path, inputs: Sequence[Input]) -> Iterator[Row]:
    """A line per row: an object with a list for each input, or the list alone if there is one input."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _json_row(line, inputs, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _json_row(line: str, inputs: Sequence[Input], where: str) -> Row:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        if len(inputs) > 1:
            raise ConfigError(f"{where}: expected an object with {', '.join(given.name for given in inputs)}")
        found = {inputs[0].name: found}
    _check_names(where, set(found), inputs)
    row = tuple(_made(found[given.name], given, f"{where}: {given.name}") for given in inputs)
    for value, given in zip(row, inputs):
        _check_dimensions(value.ndim, given, f"{where}: {given.name}")
    return row


# ---- values


def _made(values: Any, given: Input, where: str) -> torch.Tensor:
    """A row from nested lists of numbers."""
    try:
        row = torch.tensor(values, dtype=torch.float64 if given.dtype.is_floating_point else None)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"{where}: expected numbers in lists of equal lengths: {error}") from error
    return _typed(row, given, where)


def _typed(values: torch.Tensor, given: Input, where: str) -> torch.Tensor:
    """Values in the dtype of an input. Numbers with a fraction are not rounded to whole ones."""
    whole = not given.dtype.is_floating_point and not given.dtype.is_complex
    if whole and (values.is_floating_point() or values.is_complex()):
        raise ConfigError(f"{where} takes whole numbers ({given.dtype}), got {values.dtype}")
    return values.to(given.dtype)


def _check_dimensions(count: int, given: Input, where: str) -> None:
    if count != len(given.shape):
        raise ConfigError(f"{where}: a row has {count} dimensions; expected {len(given.shape)}, as in {given.shape}")


def _only_one(path: Path, inputs: Sequence[Input]) -> None:
    if len(inputs) > 1:
        names = ", ".join(given.name for given in inputs)
        raise ConfigError(
            f"{path}: {path.suffix} holds one input, and the network has {names}: use .jsonl or .safetensors"
        )


def _check_names(where: str, found: set[str], inputs: Sequence[Input]) -> None:
    wanted = {given.name for given in inputs}
    if found != wanted:
        shown = ", ".join(shortened(name) for name in sorted(found)[:8]) or "nothing"
        raise ConfigError(f"{where} has {shown}; expected {', '.join(sorted(wanted))}")
