"""The costs of ops, from any source, and their file format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import nn

from pipepart.errors import PlanError
from pipepart.files import Field, load_json, write_whole

__all__ = ["SPLIT_LAYERS", "OpCosts", "given_costs", "read_costs", "write_costs"]

SPLIT_LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose backward the runtime can run in two halves: the gradient of the input, and later that of the weights."""

_VERSION = 1
_COLUMNS = ("forward", "backward_input", "backward_weight", "parameter_bytes", "saved_bytes", "output_bytes")
_OPTIONAL_COLUMNS = ("split_extra", "savers")


@dataclass(frozen=True)
class OpCosts:
    """Times in seconds for one micro-batch and sizes in bytes, one entry per op of an `OpGraph`, in its order."""

    names: tuple[str, ...]
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    source: str
    """Source of the numbers: ``profile``, ``analytic``, or the name of a file."""
    split_extra: tuple[float, ...] = ()
    """Additional seconds of an op whose backward runs in two halves. Empty: none."""
    savers: tuple[tuple[int, ...], ...] = ()
    """Numbers of the ops that keep the output of an op for their backward, in order. Empty: not known.

    A tensor that several ops keep counts once in `saved_bytes`, with the first of them."""
    notes: tuple[str, ...] = ()
    """Ops that could not be measured, with the reason; their costs are computed."""

    def __post_init__(self) -> None:
        for column in (*_COLUMNS, *_OPTIONAL_COLUMNS):
            values: Sequence[float] = getattr(self, column)
            if len(values) != len(self) and (values or column in _COLUMNS):
                raise PlanError(f"costs: expected {len(self)} entries in {column!r}, got {len(values)}")
        for column in _COLUMNS:
            for op, value in zip(self.names, getattr(self, column)):
                if not value >= 0:
                    raise PlanError(f"costs: {column} of op {op!r} is {value}; expected a number >= 0")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def backward(self) -> tuple[float, ...]:
        """Seconds of the whole backward of each op: the input part and the weight part."""
        return tuple(i + w for i, w in zip(self.backward_input, self.backward_weight))

    @property
    def step(self) -> float:
        """Seconds of the forward and backward of all ops."""
        return sum(self.forward) + sum(self.backward_input) + sum(self.backward_weight)

    def scaled(self, factor: float, forward: float | None = None, backward: float | None = None) -> OpCosts:
        """Return the costs of a micro-batch that is `factor` times as large; parameters do not grow with it.

        Times grow in proportion, or by the factors `forward` and `backward` where these were measured.
        """
        scaled = self._timed(factor if forward is None else forward, factor if backward is None else backward)
        return replace(
            scaled,
            saved_bytes=tuple(round(size * factor) for size in self.saved_bytes),
            output_bytes=tuple(round(size * factor) for size in self.output_bytes),
        )

    def faster(self, factor: float) -> OpCosts:
        """Return the costs on a device that is `factor` times as fast."""
        return self._timed(1 / factor, 1 / factor)

    def _timed(self, forward: float, backward: float) -> OpCosts:
        return replace(
            self,
            forward=tuple(t * forward for t in self.forward),
            backward_input=tuple(t * backward for t in self.backward_input),
            backward_weight=tuple(t * backward for t in self.backward_weight),
            split_extra=tuple(t * backward for t in self.split_extra),
        )

    @staticmethod
    def read(field: Field) -> OpCosts:
        """Read costs from a file, and refuse a file whose `savers` name an op that does not exist."""
        costs = field.read(OpCosts)
        for op, savers in enumerate(costs.savers):
            if any(saver >= len(costs) for saver in savers):
                raise field.at("savers").at(op).refused(f"numbers of ops below {len(costs)}")
        return costs


def write_costs(path: str | Path, costs: OpCosts) -> None:
    """Write costs as JSON, one list per field."""
    write_whole(path, json.dumps({"version": _VERSION, **asdict(costs)}, indent=1) + "\n")


def read_costs(path: str | Path) -> OpCosts:
    """Read a file of `write_costs`."""
    file = load_json(path)
    data = dict(file.entries())
    if data.pop("version", None) != _VERSION:
        raise PlanError(
            f"costs: {path} has version {file.value.get('version')!r}; expected {_VERSION}. Write the file again."
        )
    return OpCosts.read(replace(file, value={"source": str(path), **data}))


def given_costs(path: str | Path, names: Sequence[str]) -> OpCosts:
    """Read the costs of the ops of a graph, in the order of the graph; every op must be in the file."""
    costs = read_costs(path)
    index = {name: i for i, name in enumerate(costs.names)}
    missing = [name for name in names if name not in index]
    if missing:
        raise PlanError(
            f"costs: {path} has no entry for op {missing[0]!r} ({len(missing)} of {len(names)} ops are missing): "
            "write the file again for this model, or use cost='profile' or cost='analytic'"
        )
    chosen = [index[name] for name in names]
    columns = {column: tuple(getattr(costs, column)[i] for i in chosen) for column in _COLUMNS}
    return OpCosts(names=tuple(names), source=str(path), **columns)
