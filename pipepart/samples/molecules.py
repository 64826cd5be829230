"""Batches of molecules as chemprop makes them: taken apart into molecules, and put together from some of them.

Such a batch has no cut of its own. Its rows are those of atoms or of bonds, and whole numbers in it count atoms, bonds or
molecules from the beginning of the batch; which of these is known for each of its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from pipepart.recording.inputs.trees import library_of

__all__ = ["is_molecules", "molecules_of", "put_together"]

_FIELDS: dict[str, tuple[str, str]] = {
    "V": ("atoms", ""), "E": ("bonds", ""), "edge_index": ("bonds", "atoms"), "rev_edge_index": ("bonds", "bonds"),
    "batch": ("atoms", "molecules"), "bond_batch": ("bonds", "molecules"),
}  # fmt: skip
"""What the rows of a field are (the last dimension of `edge_index`), and what its numbers count."""

Molecule = dict[str, torch.Tensor]


def is_molecules(value: Any) -> bool:
    """Whether this is a batch of molecules with fields that are known."""
    return library_of(value, "chemprop", "BatchMolGraph") and set(_fields(value)) <= set(_FIELDS)


def molecules_of(batch: Any) -> list[Molecule]:
    """The fields of each molecule; what counts something begins with 0 in each of them."""
    held, count = _fields(batch), len(batch)
    numbers = torch.arange(count, device=held["batch"].device)
    owners = {"atoms": held["batch"], "bonds": held["batch"][held["edge_index"][0]]}
    starts = {what: torch.searchsorted(owner, numbers).tolist() for what, owner in owners.items()}
    sizes = {what: torch.bincount(owner, minlength=count).tolist() for what, owner in owners.items()}
    starts["molecules"] = list(range(count))
    found = []
    for i in range(count):
        own: Molecule = {}
        for name, value in held.items():
            rows, counted = _FIELDS[name]
            part = value.narrow(_dim(name), starts[rows][i], sizes[rows][i])
            own[name] = part - starts[counted][i] if counted else part
        found.append(own)
    return found


def put_together(like: Any, molecules: Sequence[Molecule]) -> Any:
    """A batch of the same class with these molecules."""
    made = object.__new__(type(like))
    offsets = {"atoms": 0, "bonds": 0, "molecules": 0}
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in _fields(like)}
    for own in molecules:
        for name, value in own.items():
            counted = _FIELDS[name][1]
            parts[name].append(value + offsets[counted] if counted else value)
        for what, size in (("atoms", len(own["V"])), ("bonds", len(own["E"])), ("molecules", 1)):
            offsets[what] += size
    for name, values in parts.items():
        object.__setattr__(made, name, torch.cat(values, _dim(name)))
    object.__setattr__(made, "_BatchMolGraph__size", len(molecules))
    return made


def _dim(name: str) -> int:
    return 1 if name == "edge_index" else 0


def _fields(batch: Any) -> dict[str, torch.Tensor]:
    held = {field.name: getattr(batch, field.name, None) for field in fields(batch)}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
