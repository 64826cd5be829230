"""Analytic costs against the numbers that follow from shapes, and against what torch really keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipepart.cost.analytic import analytic
from pipepart.cost.cluster import DeviceKind
from pipepart.graph import OpGraph, capture

CARD = DeviceKind("card", {"float32": 1e12, "bfloat16": 2e12}, 1e15, 8e9, efficiency=1.0, launch=0.0)
SLOW_MEMORY = DeviceKind("slow", {"float32": 1e18}, 1e9, 8e9, efficiency=0.75, launch=1e-6)


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (z.view(batch, length, 4, -1).transpose(1, 2) for z in self.qkv(self.norm(x)).split(width, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def graph(model: Model) -> OpGraph:
    return capture(model, (torch.randint(100, (4, 32)),)).graph


def test_a_linear_layer_is_two_flops_per_weight_and_row(graph: OpGraph) -> None:
    costs = analytic(graph, CARD)
    up = next(i for i, op in enumerate(graph.ops) if op.module == "blocks.0.up")
    exact = 2 * 4 * 32 * 64 * 256 / 1e12
    # By torch's counter exactly this; from shapes with the bias as one more row.
    assert costs.forward[up] == pytest.approx(exact, rel=0.02)
    assert costs.backward_input[up] == pytest.approx(exact, rel=0.02)
    assert costs.backward_weight[up] == pytest.approx(exact, rel=0.02)


def test_attention_and_views(graph: OpGraph) -> None:
    costs = analytic(graph, CARD)
    attention = next(i for i, op in enumerate(graph.ops) if op.target.endswith("scaled_dot_product_attention"))
    full = 4 * 4 * 4 * 32 * 32 * 16 / 1e12
    assert full / 2 * 0.9 <= costs.forward[attention] <= full * 1.1
    assert costs.backward_weight[attention] == 0
    for i, op in enumerate(graph.ops):
        if op.target in ("view", "transpose", "split") or op.kind == "input":
            assert costs.forward[i] == costs.backward[i] == costs.saved_bytes[i] == 0


def test_nothing_flows_back_into_the_batch(graph: OpGraph) -> None:
    costs = analytic(graph, CARD)
    embed = next(i for i, op in enumerate(graph.ops) if op.module_class == "Embedding")
    assert costs.backward_input[embed] == 0
    assert costs.backward_weight[embed] > 0


def test_memory_bound_ops_follow_their_bytes(graph: OpGraph) -> None:
    costs = analytic(graph, SLOW_MEMORY)
    add = next(i for i, op in enumerate(graph.ops) if op.target.endswith("add"))
    moved = 3 * 4 * 32 * 64 * 4
    assert costs.forward[add] == pytest.approx(moved / (1e9 * 0.9) + 1e-6)


def test_larger_micro_batches_and_other_dtypes(graph: OpGraph) -> None:
    base, double, half = (
        analytic(graph, CARD),
        analytic(graph, CARD, batch_scale=2.0),
        analytic(graph, CARD, dtype="bfloat16"),
    )
    assert sum(double.forward) == pytest.approx(2 * sum(base.forward), rel=1e-6)
    assert double.parameter_bytes == base.parameter_bytes
    assert sum(double.saved_bytes) == 2 * sum(base.saved_bytes)
    assert sum(half.forward) == pytest.approx(sum(base.forward) / 2, rel=1e-4)


def test_saved_bytes_are_near_what_autograd_keeps(model: Model, graph: OpGraph) -> None:
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randint(100, (4, 32)))
    assert loss.requires_grad
    predicted = sum(analytic(graph, CARD).saved_bytes)
    assert predicted == pytest.approx(sum(kept.values()), rel=0.1)
