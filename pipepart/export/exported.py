"""Exports a network to a format, opens what was written, and compares it with the network: outputs, size and latency."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipepart.errors import ConfigError, PipepartError, did_you_mean
from pipepart.export.model_folder import is_library_model, open_folder, write_folder
from pipepart.export.narrow_weights import BITS
from pipepart.export.network import CannotExport, Network, refused
from pipepart.export.onnx_file import open_onnx, write_onnx
from pipepart.export.program_file import open_program, write_program
from pipepart.export.weights_file import open_weights, write_weights

__all__ = ["FORMATS", "Compared", "check_request", "export_network", "wanted_kind"]

Run = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]

_NEAR = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The tolerance of outputs by their dtype, absolute and relative; of all others 1e-4."""
_ROWS = (1, 3, 4)
"""Batches of the comparison: an export must work for any number of rows."""
_ROUNDS, _SECONDS = 20, 4.0
"""Calls of each program whose latency is measured, and the time after which fewer of them are enough."""


@dataclass(frozen=True)
class Format:
    ending: str
    write: Callable[[Network, Path, str | None], None]
    open: Callable[[Network, Path], Any]


FORMATS = {
    "onnx": Format(".onnx", write_onnx, open_onnx),
    "safetensors": Format(".safetensors", write_weights, open_weights),
    "hf": Format("-hf", write_folder, open_folder),
    "pt2": Format(".pt2", write_program, open_program),
}


@dataclass(frozen=True)
class Compared:
    """One form of a network beside the network in torch."""

    name: str
    bytes: int
    seconds: float
    """The median time of a call with four rows."""
    largest: float
    """The largest difference of an output, over all compared batches."""
    mean: float


def check_request(to: str, quantize: str | None) -> None:
    """Refuse an unknown format, or one that has no weights of fewer bits."""
    if to not in FORMATS:
        raise ConfigError(f"--to {to}: there is no such format; {did_you_mean(to, FORMATS)}")
    if quantize is not None and quantize not in BITS:
        raise ConfigError(f"--quantize {quantize}: {did_you_mean(quantize, BITS)}")
    if to == "hf" and quantize is not None:
        raise CannotExport(
            f"--to hf takes no --quantize {quantize}: from_pretrained quantizes a folder when it loads it"
        )


def wanted_kind(to: str) -> Callable[[Any], bool] | None:
    """The kind of module that a format can hold; None: any."""
    return is_library_model if to == "hf" else None


def export_network(
    network: Network,
    to: str,
    target: Path,
    quantize: str | None = None,
    extras: Callable[[Path], Any] | None = None,
) -> list[Compared]:
    """Write the network to `target`, and return the table: torch, the format, and the format in fewer bits.

    What was written is run on batches of several sizes. An export in full whose outputs differ from those of torch is refused,
    and nothing is left under its name. `extras(path)` adds to what was written.
    """
    check_request(to, quantize)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        kind, rows = FORMATS[to], [network.rows(count) for count in _ROWS]
        expected = [network(values) for values in rows]
        size = sum({id(v): v.nbytes for v in network.module.state_dict(keep_vars=True).values()}.values())
        runs: dict[str, tuple[int, Run]] = {"torch": (size, network)}
        written = scratch / "full" / target.name
        for bits in (None, quantize) if quantize else (None,):
            written = scratch / (bits or "full") / target.name
            written.parent.mkdir()
            kind.write(network, written, bits)
            opened = _tried(network, to, partial(_opened, kind, network, written))
            runs[f"{to} {bits}" if bits else to] = _bytes_of(written.parent), opened
        differences = {
            name: _tried(network, name, partial(_differences, name, run, rows, expected))
            for name, (_, run) in runs.items()
        }
        _check_equal(network, to, runs[to][1], rows, expected)
        seconds = _latencies({name: run for name, (_, run) in runs.items()}, network.rows(4))
        if extras is not None:
            extras(written)
        _put(written.parent, target.parent)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [Compared(name, size, seconds[name], *differences[name]) for name, (size, _) in runs.items()]


def _tried(network: Network, who: str, action: Callable[[], Any]) -> Any:
    """Do something with what was written; errors of the library that runs it refuse the export."""
    try:
        return action()
    except (PipepartError, OSError):
        raise
    except Exception as error:
        raise refused(network, who, error) from error


def _opened(kind: Format, network: Network, written: Path) -> Run:
    found = kind.open(network, written)
    if not isinstance(found, torch.nn.Module):
        return found  # type: ignore[no-any-return]

    def run(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return tuple(found(*values))

    return run


def _bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _put(folder: Path, place: Path) -> None:
    """Move what was written under its names; an earlier export of the same name is replaced."""
    for made in folder.iterdir():
        target = place / made.name
        if made.is_dir() and target.is_dir():
            aside = folder.parent / f"{made.name}.old"
            os.replace(target, aside)
        os.replace(made, target)


def _differences(
    name: str, run: Run, rows: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]]
) -> tuple[float, float]:
    """The largest and the mean difference of all outputs."""
    found = []
    for values, wanted in zip(rows, expected):
        given = run(values)
        for one, other in zip(given, wanted):
            if one.shape != other.shape:
                raise CannotExport(
                    f"{name} returns {tuple(one.shape)} for {len(values[0])} rows, and torch {tuple(other.shape)}: the "
                    "export does not work for batches of any size"
                )
            found.append((one.double() - other.double()).abs().flatten())
    every = torch.cat(found)
    return (float(every.max()), float(every.mean())) if len(every) else (0.0, 0.0)


def _check_equal(
    network: Network, to: str, run: Run, rows: Sequence[Any], expected: Sequence[Sequence[torch.Tensor]]
) -> None:
    """Refuse an export in full that does not compute what the network computes."""
    for values, wanted in zip(rows, expected):
        for name, one, other in zip(network.outputs, run(values), wanted):
            near = _NEAR.get(other.dtype, 1e-4)
            if not torch.allclose(one.double(), other.double(), rtol=near, atol=near, equal_nan=True):
                worst = (one.double() - other.double()).abs().max()
                raise CannotExport(
                    f"{to} is refused: {name} of {type(network.module).__name__} differs from torch by {worst:.2g} (allowed "
                    f"{near:g}) for {len(values[0])} rows"
                )


def _latencies(runs: dict[str, Run], values: Sequence[torch.Tensor]) -> dict[str, float]:
    """The median time of a call on one core, in turns, so that other work on the machine meets all of them alike."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    threads, started = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)  # threads that wait for each other make torch many times slower on a busy machine
    try:
        for number in range(_ROUNDS):
            if number >= 3 and time.perf_counter() - started > _SECONDS:
                break
            for name, run in runs.items():
                before = time.perf_counter()
                run(values)
                spent[name].append(time.perf_counter() - before)
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(times) for name, times in spent.items()}
