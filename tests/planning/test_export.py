"""Plans in the forms of other libraries, read back as these read them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from planning_samples import chain, planned, sample_costs, sizes_of
from support.ranks import run_ranks
from torch import nn

from pipepart import Plan, plan
from pipepart.cost.cluster import Cluster, DeviceKind, LinkKind, Node
from pipepart.errors import PlanError
from pipepart.planning.exported_plans import read_layout
from pipepart.schedule import from_csv

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None


class Decoder(nn.Module):
    """Runs the parts that it has, as torchtitan's models do: each rank deletes those of other ranks."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers:
            x = x + layer(x) if layer is not None else x
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)

    def keep(self, paths: Sequence[str]) -> Decoder:
        """Delete all parts but these."""
        for name, _ in list(self.named_children()):
            if name != "layers" and name not in paths:
                setattr(self, name, None)
        for number in range(len(self.layers)):
            if f"layers.{number}" not in paths:
                self.layers[number] = None
        return self


class Training(nn.Module):
    """The model under a path, with its loss, as a LightningModule has it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randint(17, (samples, 5)), torch.randint(17, (samples, 5))


@cache
def made(schedule: str = "1f1b", stages: int = 2) -> Plan:
    torch.manual_seed(0)
    whole = [[f"model.layers.{n}"] for n in range(6)]
    device = DeviceKind("gpu", {"float32": 1e9}, 1e10, 1e9, 1.0, 0.0)
    wire = LinkKind("wire", 1e10, 1e-6)
    cluster = Cluster("sample", {"gpu": device}, {"wire": wire}, (Node(("gpu",) * stages, "wire"),), "wire")
    shape = {"stages": stages, "replicas": 1, "microbatches": 4, "schedule": schedule}
    return plan(Training(), batch(), cluster=cluster, keep_together=whole, **shape)


EXPECTED = ["tok_embeddings", *(f"layers.{n}" for n in range(6)), "norm", "output"]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_megatron(schedule, chunks):
    found = made(schedule).export("megatron")
    words = dict(zip(found.text.split()[::2], found.text.split()[1::2]))
    assert words["--pipeline-model-parallel-size"] == "2"
    assert (words["--micro-batch-size"], words["--global-batch-size"]) == ("2", "8")
    parts = read_layout(words["--pipeline-model-parallel-layout"].strip('"'))
    assert len(parts) == 2 * chunks
    assert "".join(parts) == "E" + 6 * "t" + "L"
    assert [part.count("t") for part in parts] == [sum("layers" in path for path in mine) for mine in found.parts]


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("E||t|L", ["E", "", "t", "L"]),
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
    ],
)
def test_the_layouts_of_megatrons_manual_are_read(layout, parts):
    assert read_layout(layout) == parts


@pytest.mark.skipif(tomllib is None, reason="tomllib is in Python 3.11 and later")
@pytest.mark.parametrize(
    ("schedule", "name"), [("interleaved", "Interleaved1F1B"), ("zb_v", "ZBVZeroBubble"), ("zb_h1", None)]
)
def test_torchtitan(schedule, name):
    found = made(schedule).export("torchtitan")
    section = tomllib.loads(found.text)["parallelism"]
    assert section["pipeline_parallel_degree"] == 2
    parts = section["module_fqns_per_model_part"]
    assert [path for part in parts for path in part] == EXPECTED
    kept = [set(Decoder().keep(part).state_dict()) for part in parts]
    assert set.union(*kept) == set(Decoder().state_dict())
    assert sum(map(len, kept)) == len(Decoder().state_dict())
    if name is None:
        assert section["pipeline_parallel_schedule_csv"] == "schedule.csv"
    else:
        assert section["pipeline_parallel_schedule"] == name


def _train(text: str) -> dict[str, torch.Tensor]:
    """One step of `torch.distributed.pipelining` on this rank, from what was exported."""
    import tempfile
    from pathlib import Path

    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    entries, rank = json.loads(text), dist.get_rank()
    torch.manual_seed(0)
    whole = Training().model
    mine = [stage for stage, home in enumerate(entries["rank_of_stage"]) if home == rank]
    count = len(entries["rank_of_stage"])
    parts = {stage: Decoder() for stage in mine}
    stages = []
    for stage, part in parts.items():
        part.load_state_dict(whole.state_dict())
        part.keep(entries["modules_of_stage"][stage])
        stages.append(PipelineStage(part, stage, count, torch.device("cpu")))

    def loss(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(found.flatten(0, 1), expected.flatten())

    schedule = _PipelineScheduleRuntime(stages, entries["microbatches"], loss_fn=loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(entries["csv"])
        schedule._load_csv(str(path))
    x, y = batch()
    last = count - 1 in mine
    schedule.step(*([x] if 0 in mine else []), **({"target": y, "losses": []} if last else {}))
    return {name: p.grad for part in parts.values() for name, p in part.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_torch_runs_it(schedule):
    exported = made(schedule).export("torch")
    entries = json.loads(exported.text)
    assert from_csv(entries["csv"]).placement == tuple(entries["rank_of_stage"])
    torch.manual_seed(0)
    plain = Training()
    plain(*batch()).backward()
    expected = {name: p.grad for name, p in plain.model.named_parameters()}
    found = [entry for rank in run_ranks(2, _train, exported.text) for entry in rank.items()]
    assert sorted(name for name, _ in found) == sorted(expected)
    for name, gradient in found:
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_a_cut_inside_a_layer_is_refused_or_moved():
    whole = made()
    inside = [n for n, path in enumerate(whole.modules) if path.startswith("model.layers.2")]
    cut = tuple(0 if n <= inside[0] else 1 for n in range(len(whole.ops)))
    divided = dataclasses.replace(whole, chunk_of=cut)
    with pytest.raises(
        PlanError, match=r"a cut of this plan lies in model\.layers\.2; .*keep_together=\[\['model\.layers\.0'\]"
    ):
        divided.export("megatron")
    found = divided.export("megatron", snap=True)
    assert any("model.layers.2 whole in chunk" in note for note in found.notes)
    assert [path for part in found.parts for path in part] == EXPECTED


def test_what_cannot_be_expressed_is_refused():
    with pytest.raises(
        PlanError, match=r"megatron places chunks in turn .* schedule 'zb_v' places them \(0, 1, 1, 0\)"
    ):
        made("zb_v").export("megatron")
    with pytest.raises(PlanError, match="torchtitan does not know schedule 'v_half'"):
        made("v_half").export("torchtitan")
    with pytest.raises(PlanError, match=r"target 'megatrn' is not known: did you mean 'megatron'\?"):
        made().export("megatrn")
    with pytest.raises(
        PlanError, match=r"layers='model': expected the path of a module list .* this model: model\.layers"
    ):
        made().export("torch", layers="model")
    with pytest.raises(PlanError, match="does not name the modules of its ops"):
        dataclasses.replace(made(), modules=()).export("torch")
    assert "megatron runs 1f1b instead of zb_h1" in made("zb_h1").export("megatron").notes


def test_a_plan_of_made_up_costs_is_exported_too():
    graph = chain(8)
    found = planned(graph, sample_costs(graph), 1, sizes_of(graph), stages=2, microbatches=4).export("torch")
    assert [path for part in found.parts for path in part] == [f"layers.{n}" for n in range(8)]
