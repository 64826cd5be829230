"""A stand-in for chemprop's batch of molecules: the same fields, slots and constructor, without the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["BatchMolGraph", "Passing", "molecules"]


@dataclass(repr=False, eq=False, slots=True)
class BatchMolGraph:
    mgs: InitVar[Sequence[dict[str, torch.Tensor]]]
    V: torch.Tensor = field(init=False)
    E: torch.Tensor = field(init=False)
    edge_index: torch.Tensor = field(init=False)
    rev_edge_index: torch.Tensor = field(init=False)
    batch: torch.Tensor = field(init=False)

    __size: int = field(init=False)

    def __post_init__(self, mgs: Sequence[dict[str, torch.Tensor]]) -> None:
        self.__size = len(mgs)
        atoms, bonds = 0, 0
        edges, reverse, batch = [], [], []
        for i, mg in enumerate(mgs):
            edges.append(mg["edge_index"] + atoms)
            reverse.append(mg["rev_edge_index"] + bonds)
            batch.append(torch.full((len(mg["V"]),), i))
            atoms, bonds = atoms + len(mg["V"]), bonds + len(mg["E"])
        self.V, self.E = torch.cat([mg["V"] for mg in mgs]), torch.cat([mg["E"] for mg in mgs])
        self.edge_index, self.rev_edge_index, self.batch = torch.cat(edges, 1), torch.cat(reverse), torch.cat(batch)

    def __len__(self) -> int:
        return self.__size


BatchMolGraph.__module__ = "chemprop.data.collate"  # what it is known by


def molecules(count: int, seed: int = 0) -> tuple[BatchMolGraph, torch.Tensor]:
    """Chains of atoms; the last has one atom and no bond."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        atoms = 1 if index == count - 1 else 2 + (index + seed) % 3
        there = torch.arange(atoms - 1)
        forth = torch.stack([there, there + 1])
        reverse = torch.cat([there + atoms - 1, there])
        edges = torch.cat([forth, forth.flip(0)], 1)
        v, e = (torch.randn(n, 3, generator=generator).double() for n in (atoms, edges.shape[1]))
        found.append({"V": v, "E": e, "edge_index": edges, "rev_edge_index": reverse})
    return BatchMolGraph(found), torch.randn(count, 2, generator=generator).double()


class Passing(nn.Module):
    """Messages along bonds, then a sum for each molecule, of which the largest number in the batch tells how many."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = (nn.Linear(n, m).double() for n, m in ((6, 8), (8, 8), (11, 2)))

    def forward(self, graphs: BatchMolGraph, Y: torch.Tensor) -> torch.Tensor:
        hidden = start = self.first(torch.cat([graphs.V[graphs.edge_index[0]], graphs.E], 1))
        for _ in range(2):
            into = torch.zeros(graphs.V.shape[0], 8).double().index_add(0, graphs.edge_index[1], hidden)
            hidden = (start + self.again(into[graphs.edge_index[0]] - hidden[graphs.rev_edge_index])).tanh()
        into = torch.zeros(graphs.V.shape[0], 8).double().index_add(0, graphs.edge_index[1], hidden)
        atoms = self.head(torch.cat([graphs.V, into], 1))
        sums = torch.zeros(graphs.batch.max().int() + 1, 2).double().index_add(0, graphs.batch, atoms)
        return F.mse_loss(sums[: len(graphs)], Y)
