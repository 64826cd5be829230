"""Models of graphs of torch-geometric and of molecules of chemprop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from tools.bench.zoo.library_parts import Built, of

__all__ = ["chemprop", "graph_net", "node_classes"]


def _graph_batch(n: int) -> tuple[Any]:
    from torch_geometric.data import Batch, Data

    found = []
    for index in range(n):
        nodes = 3 + index % 3
        edges = torch.randint(0, nodes, (2, 2 * nodes))
        found.append(Data(x=torch.randn(nodes, 5), edge_index=edges, y=torch.randn(1), pos=torch.randn(nodes, 3)))
    return (Batch.from_data_list(found),)


def graph_net(name: str, pass_batch: bool = False, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        from torch_geometric import nn as graphs

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = getattr(graphs, name)(5, 16, num_layers=3, **options)
                self.head = nn.Linear(16, 1)

            def forward(self, data: Any) -> torch.Tensor:
                known = {"batch": data.batch} if pass_batch else {}  # norms of graphs need it
                pooled = graphs.global_mean_pool(self.body(data.x, data.edge_index, **known), data.batch)
                return F.mse_loss(self.head(pooled).squeeze(-1), data.y)

        return Net(), _graph_batch

    return build


def node_classes() -> Built:
    """A class for each node: the loss is a mean over nodes, of which graphs have different numbers."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = of("torch_geometric.nn.GraphSAGE", 5, 16, num_layers=3, out_channels=4, norm="graph_norm")

        def forward(self, data: Any) -> torch.Tensor:
            out = self.body(data.x, data.edge_index, batch=data.batch)
            return F.cross_entropy(out, data.x[:, :4].argmax(1))

    return Net(), _graph_batch


def _molecules(n: int) -> tuple[Any, torch.Tensor]:
    from chemprop.data import BatchMolGraph, MoleculeDatapoint, MoleculeDataset

    names = ["CCO", "c1ccccc1", "CC(=O)O", "CCN(CC)CC", "C1CCCCC1O", "CO"]
    data = MoleculeDataset([MoleculeDatapoint.from_smi(names[i % 6], torch.zeros(1).numpy()) for i in range(n)])
    return BatchMolGraph([data[i].mg for i in range(n)]), torch.randn(n, 1)


def chemprop(passing: str, aggregation: str) -> Callable[[], Built]:
    """Message passing, aggregation and predictor of chemprop with its own batches of molecules."""

    def build() -> Built:
        from chemprop import nn as parts
        from chemprop.models import MPNN

        class Called(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                head = parts.RegressionFFN(input_dim=32, hidden_dim=32)
                self.model = MPNN(getattr(parts, passing)(d_h=32), getattr(parts, aggregation)(), head)

            def forward(self, molecules: Any, target: torch.Tensor) -> torch.Tensor:
                return F.mse_loss(self.model(molecules), target)

        return Called(), _molecules

    return build
