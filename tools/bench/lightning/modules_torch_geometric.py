"""Graphs of PyTorch Geometric: the module of its GraphGym, and modules as its users write them around its layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tools.bench.lightning.modules_case import Cases

__all__ = ["CASES", "load"]

CASES = Cases()


def load() -> None:
    """Import the library."""
    import torch_geometric.graphgym
    import torch_geometric.nn  # noqa: F401


def _graphs(count: int = 24) -> list[Any]:
    import torch
    from torch_geometric.data import Data

    made = torch.Generator().manual_seed(0)
    graphs = []
    for number in range(count):
        nodes = 4 + number % 5
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=made)
        features = torch.randn(nodes, 8, generator=made, dtype=torch.float64)
        graphs.append(Data(x=features, edge_index=edges, y=torch.tensor([number % 3])))
    return graphs


def _fit(network: Any) -> None:
    import lightning.pytorch as pl
    import torch
    from torch.nn.functional import cross_entropy
    from torch_geometric.loader import DataLoader
    from torchmetrics import Accuracy

    class Classifier(pl.LightningModule):
        """Classifies graphs, with an accuracy for each of its loops."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network
            self.train_accuracy = Accuracy(task="multiclass", num_classes=3)
            self.val_accuracy = Accuracy(task="multiclass", num_classes=3)

        def forward(self, data: Any) -> torch.Tensor:
            result: torch.Tensor = self.network(data)
            return result

        def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
            scores = self(data)
            self.train_accuracy(scores.softmax(dim=-1), data.y)
            self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True, batch_size=data.num_graphs)
            return cross_entropy(scores, data.y)

        def validation_step(self, data: Any, batch_idx: int) -> None:
            self.val_accuracy(self(data).softmax(dim=-1), data.y)
            self.log("val_accuracy", self.val_accuracy, on_step=False, on_epoch=True, batch_size=data.num_graphs)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    graphs = _graphs()
    loaders = DataLoader(graphs, batch_size=8, shuffle=True), DataLoader(graphs, batch_size=8)
    pl.Trainer().fit(Classifier(), *loaders)


def _pooled(convolution: str, pool: str, **options: Any) -> Any:
    import torch
    from torch_geometric import nn

    class Pooled(torch.nn.Module):
        """Three convolutions, a pool over each graph, and a linear layer."""

        def __init__(self) -> None:
            super().__init__()
            kind = getattr(nn, convolution)
            widths = [8, 16, 16, 16]
            self.layers = torch.nn.ModuleList([kind(a, b, **options) for a, b in pairwise(widths)])
            self.head = torch.nn.Linear(16, 3)

        def forward(self, data: Any) -> torch.Tensor:
            x = data.x
            for layer in self.layers:
                x = layer(x, data.edge_index).relu()
            pooled: torch.Tensor = self.head(getattr(nn, pool)(x, data.batch, data.num_graphs))
            return pooled

    return Pooled()


@CASES.add("torch_geometric.gcn")
def _gcn() -> None:
    _fit(_pooled("GCNConv", "global_mean_pool"))


@CASES.add("torch_geometric.sage")
def _sage() -> None:
    _fit(_pooled("SAGEConv", "global_max_pool"))


@CASES.add("torch_geometric.graph_conv")
def _graph_conv() -> None:
    _fit(_pooled("GraphConv", "global_add_pool"))


@CASES.add("torch_geometric.graphgym", microbatches=1, remark="microbatches=1: batch norm")
def _graphgym() -> None:
    import lightning.pytorch as pl
    from torch_geometric.graphgym.config import cfg, set_cfg
    from torch_geometric.graphgym.model_builder import create_model
    from torch_geometric.loader import DataLoader

    set_cfg(cfg)
    cfg.accelerator = "cpu"
    cfg.dataset.task = "graph"
    cfg.dataset.task_type = "classification"
    cfg.gnn.head = "graph"
    cfg.model.loss_fun = "cross_entropy"
    cfg.gnn.dim_inner, cfg.gnn.layers_mp, cfg.gnn.dropout = 16, 2, 0.0
    module = create_model(dim_in=8, dim_out=3)
    loader = DataLoader(_graphs(), batch_size=8)
    pl.Trainer().fit(module, loader, loader)
