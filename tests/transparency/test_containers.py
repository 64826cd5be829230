"""Batches in containers of every kind: equal to one plain process on the whole batch, or refused by name."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support.containers import KINDS, Reads, TimeMajor, WithOwnSplit, batch_of, content
from support.molecules import Passing, molecules
from support.ranks import run_ranks
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from pipepart import Pipeline, PipelineStrategy
from pipepart.errors import CaptureError, ConfigError, PlanError
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.trees import in_one_piece


def whole(model: nn.Module, *batch: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Outputs and gradients of one plain process on the whole batch."""
    model = copy.deepcopy(model)
    out = model(*copy.deepcopy(batch))
    loss = out if isinstance(out, torch.Tensor) else trees.leaves_of(out)[0]
    loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def piped(model: nn.Module, batches: list[Any], **options: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Outputs of a step for each batch, and the gradients of the last on this rank."""
    pipe = Pipeline(model, batches[0], **options)
    outputs = []
    for batch in batches:
        for parameter in pipe.parameters():
            parameter.grad = None
        out = pipe.step(*batch)
        outputs.append([v.detach() if isinstance(v, torch.Tensor) else v for v in trees.leaves_of(out)])
    return outputs, {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def compare(model: nn.Module, batches: list[Any], answers: list[Any]) -> None:
    out, gradients = whole(model, *batches[-1])
    merged: dict[str, torch.Tensor] = {}
    for _, part in answers:
        merged.update(part)
    assert merged.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-9, atol=1e-12)
    last = [outputs[-1] for outputs, _ in answers]  # tensors are on the stage that has the last chunk
    for index, expected in enumerate(trees.leaves_of(out)):
        got = next((values[index] for values in last if values[index] is not None), None)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(got, expected.detach(), rtol=1e-9, atol=1e-12)
        else:
            assert got == expected


def _containers(kinds: tuple[str, ...]) -> Any:
    torch.manual_seed(0)
    answers = {}
    for kind in kinds:
        batches = [(batch_of(kind, content(7, seed)),) for seed in (1, 2)]
        answers[kind] = piped(Reads(), batches, stages=2, microbatches=3)
    return answers


@pytest.mark.slow
def test_every_kind_of_container() -> None:
    torch.manual_seed(0)
    models = {kind: Reads() for kind in KINDS}
    answers = run_ranks(2, _containers, KINDS)
    for kind, model in models.items():
        compare(model, [(batch_of(kind, content(7, 2)),)], [answer[kind] for answer in answers])


def test_a_tensordict() -> None:
    pytest.importorskip("tensordict")
    model = Reads()
    batches = [(batch_of("tensordict", content(7, seed)),) for seed in (1, 2)]
    compare(copy.deepcopy(model), batches, [piped(model, batches, stages=1, microbatches=3)])


def graphs(count: int, seed: int) -> Any:
    from torch_geometric.data import Batch, Data

    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        nodes = 3 + index % 3
        edges = torch.randint(0, nodes, (2, 2 * nodes), generator=generator)
        x, y = torch.randn(nodes, 5, generator=generator).double(), torch.randn(1, generator=generator).double()
        found.append(Data(x=x, edge_index=edges, y=y))
    return Batch.from_data_list(found)


@pytest.mark.parametrize("conv", ["GCNConv", "GATConv", "SAGEConv"])
def test_batches_of_graphs(conv: str) -> None:
    nets = pytest.importorskip("torch_geometric.nn")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = getattr(nets, conv)(5, 8), getattr(nets, conv)(8, 8), nn.Linear(8, 1)

        def forward(self, data: Any) -> torch.Tensor:
            hidden = self.b(self.a(data.x, data.edge_index).relu(), data.edge_index).relu()
            pooled = nets.global_mean_pool(hidden, data.batch) + nets.global_add_pool(
                hidden, data.batch, data.num_graphs
            )
            return F.mse_loss(self.out(pooled).squeeze(-1), data.y)

    model = Net().double()
    batches = [(graphs(9, 0),), (graphs(9, 1),), (graphs(7, 2),)]
    compare(copy.deepcopy(model), batches, [piped(model, batches, stages=1, microbatches=3)])


def _molecules() -> Any:
    torch.manual_seed(0)
    return piped(Passing(), [molecules(count, count) for count in (8, 9, 5, 7)], stages=2, microbatches=3)


@pytest.mark.slow
def test_batches_of_molecules() -> None:
    torch.manual_seed(0)
    compare(Passing(), [molecules(7, 7)], run_ranks(2, _molecules, timeout=120))


def test_a_batch_of_molecules_with_a_field_that_is_not_known_is_refused() -> None:
    @dataclass(repr=False, eq=False)
    class BatchMolGraph:
        V: torch.Tensor
        faces: torch.Tensor

    BatchMolGraph.__module__ = "chemprop.data.collate"
    batch = BatchMolGraph(torch.randn(6, 3), torch.randn(4, 3))
    with pytest.raises(PlanError, match=r"BatchMolGraph.*\n.*\n.*split\(self, batch, n\)"):
        Pipeline(Passing(), (batch, torch.randn(2, 2)), stages=1, microbatches=2)


class Letters(nn.Module):
    """Names of arguments and keys that nodes of a graph cannot have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()

    def forward(self, X: torch.Tensor, input: torch.Tensor, d: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.layers(X) * input * d["type"] + d["Type"].exp() + d["a_b"] - 2 * d["a.b"] + d["\u00e9"]).mean()


def _letters() -> Any:
    torch.manual_seed(0)
    return piped(Letters(), [letters()], stages=2, microbatches=2)


def letters() -> Any:
    torch.manual_seed(1)
    values = torch.randn(7, 5, 4).double().unbind()
    return values[0], values[1], dict(zip(("type", "Type", "a_b", "a.b", "\u00e9"), values[2:]))


def test_names_of_inputs() -> None:
    torch.manual_seed(0)
    compare(Letters(), [letters()], run_ranks(2, _letters, timeout=120))


@pytest.mark.parametrize("apart", [False, True], ids=["names of graphs", "taken apart"])
def test_graphs_with_names_and_graphs_that_the_model_takes_apart(apart: bool) -> None:
    Batch = pytest.importorskip("torch_geometric.data").Batch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()

        def forward(self, data: Any) -> torch.Tensor:
            rows = torch.cat([graph.x for graph in data.to_data_list()]) if apart else data.x
            return self.layers(rows).pow(2).mean()

    batches = []
    for count in (9, 7):
        found = graphs(count, count).to_data_list()
        for index, graph in enumerate(found):
            graph.name = "C" * index
        batches.append((Batch.from_data_list(found),))
    model = Net()
    if apart:
        with pytest.raises(CaptureError, match="takes its batch of graphs apart"):
            Pipeline(model, batches[0], stages=1, microbatches=3)
    else:
        compare(copy.deepcopy(model), batches, [piped(model, batches, stages=1, microbatches=3)])


class StandIn:
    """Looks like a batch of PyTorch Geometric to what asks for its name."""

    def __init__(self) -> None:
        self._slice_dict: dict[str, Any] = {"x": [0, 2, 5]}
        self._inc_dict: dict[str, Any] = {}

    def part(self, index: int) -> Any:
        return self._slice_dict["x"][index]


def test_a_recorded_batch_of_graphs_cannot_be_taken_apart() -> None:
    kind = type("Batch", (StandIn,), {"__module__": "torch_geometric.data.batch"})
    batch = kind()
    assert batch.part(1) == 2
    with pytest.raises(CaptureError, match="takes its batch of graphs apart"):
        in_one_piece(batch).part(1)


def time_major(samples: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(samples)
    return torch.randn(5, samples, 4).double(), torch.randint(0, 3, (5, samples)), torch.ones(3).double()


def _time_major(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return piped(TimeMajor(), [time_major(8), time_major(7)], stages=2, microbatches=3, **options)


@pytest.mark.parametrize(
    "batch_dim",
    [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param({"0": 1, "1": 1, "2": None}, id="by path")],
)
def test_samples_along_another_dimension(batch_dim: Any) -> None:
    """Also where there are as many samples as steps of time, and results have theirs along that dimension, too."""
    torch.manual_seed(0)
    compare(TimeMajor(), [time_major(7)], run_ranks(2, _time_major, {"batch_dim": batch_dim}))


def flat(samples: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(samples)
    lengths = torch.randint(1, 5, (samples,))
    rows = torch.randn(int(lengths.sum()), 4).double()
    owner = torch.arange(samples).repeat_interleave(lengths)
    return {"rows": rows, "lengths": lengths, "targets": torch.randn(samples, 2).double(), "owner": owner}


def _own_split() -> Any:
    torch.manual_seed(0)
    model, batches = WithOwnSplit(), [(flat(8),), (flat(9),), (flat(2),), (flat(7),)]
    return piped(model, batches, stages=2, microbatches=3, batch_dim={"0.targets": 0})


def test_a_module_cuts_its_batches_itself() -> None:
    torch.manual_seed(0)
    compare(WithOwnSplit(), [(flat(7),)], run_ranks(2, _own_split))


def test_a_split_whose_parts_cannot_be_counted_is_refused() -> None:
    with pytest.raises(PlanError, match=r"number of samples of a batch is not clear.*'0.targets'"):
        Pipeline(WithOwnSplit(), (flat(8),), stages=1, microbatches=3)


def test_what_lies_in_one_piece_is_refused_with_the_ways_out() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 3)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.rnn(batch)[1].mean()

    batch = pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(PlanError, match=r"PackedSequence.*\n.*\n.*split\(self, batch, n\).*microbatches=1"):
        Pipeline(Packed(), (batch,), stages=1, microbatches=2)


def test_leaves_that_disagree_are_named() -> None:
    model, batch = TimeMajor(), time_major(8)
    with pytest.raises(PlanError, match=r"disagree.*\[0\] has 8 along dimension 1, \[1\] has 5 along dimension 0"):
        Pipeline(model, batch, stages=1, microbatches=2, batch_dim={"0": 1, "1": 0})
    with pytest.raises(ConfigError, match="no leaf 'z'"):
        Pipeline(model, batch, stages=1, microbatches=2, batch_dim={"z": 1})
    with pytest.raises(ConfigError, match="expected a tensor with dimension 1"):
        Pipeline(model, batch, stages=1, microbatches=2, batch_dim={"2": 1})
    for wrong in (-1, "1", True, {"x": 1.5}, None, {0: 1}):
        with pytest.raises(ConfigError, match="expected the dimension of the samples"):
            PipelineStrategy(batch_dim=wrong)  # type: ignore[arg-type]
    pipe = Pipeline(model, batch, stages=1, microbatches=2, batch_dim=1)
    with pytest.raises(CaptureError, match="dimension 0 of x is 8 and dimension 0 of y is 7"):
        pipe.step(batch[0], batch[1][:, :7], batch[2])


def test_a_table_as_long_as_the_batch_is_not_cut_where_it_is_said() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()

        def forward(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return (F.cross_entropy(self.layers(x), y, reduction="none") * weights.mean()).mean()

    model, data = Table(), content(4)
    batch = (data["x"], data["y"], torch.rand(4).double())
    options = {"stages": 1, "microbatches": 2, "batch_dim": {"2": None}}
    compare(copy.deepcopy(model), [batch], [piped(model, [batch], **options)])


class Texts(L.LightningModule):
    """Trains on what a collator of a tokenizer gives, and shows its sizes in the summary."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.example_input_array = torch.zeros(2, 5, dtype=torch.long)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.table(ids)).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self(batch["input_ids"]) * batch.attention_mask[..., None]
        return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _collated(rows: list[torch.Tensor]) -> Any:
    from transformers import BatchEncoding

    ids = torch.stack(rows)
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.roll(-1, 1)})


def _texts(devices: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    module = Texts().double()
    rows = list(torch.randint(0, 20, (22, 5)))
    strategy: Any = PipelineStrategy(stages=2, microbatches=3) if devices > 1 else "auto"
    trainer = L.Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=8, collate_fn=_collated))  # type: ignore[arg-type]
    if devices > 1:
        trainer.strategy.make_whole()  # type: ignore[attr-defined]
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def test_batches_of_a_tokenizer_and_an_example_input_under_the_trainer() -> None:
    expected = _texts(1)
    for answer in run_ranks(2, _texts, 2):
        for name, value in expected.items():
            torch.testing.assert_close(answer[name], value, rtol=1e-9, atol=1e-12)
