"""The parts of the bench: a reader or a set of options each, with the draw of a case and the code that runs it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import save as safetensors_bytes

from pipepart import PipelineStrategy, capture, plan
from pipepart.cli.config import checked, compose_config, explaining
from pipepart.cli.processes import _reason_text, _reasons
from pipepart.cli.schema import TrainConfig
from pipepart.cli.train import read_result, ready
from pipepart.cost import cache, this_machine
from pipepart.cost.cluster import load_cluster
from pipepart.cost.given import read_graph
from pipepart.cost.op_costs import OpCosts, read_costs, write_costs
from pipepart.export import read_weights
from pipepart.export.narrow_weights import narrowed
from pipepart.lightning.checkpoint_files import Content, verify
from pipepart.lightning.safetensors_weights import INDEX, SafetensorsWeights
from pipepart.lightning.strategy_options import StrategyOptions
from pipepart.machine import limits
from pipepart.options import Options
from pipepart.planning import Plan, PlanOptions
from pipepart.planning.entry import Target
from pipepart.report import load_graph, load_timeline, save_graph, save_timeline
from pipepart.report.account import Account, MeanStep, account_of, load_account, save_account
from pipepart.report.graph_view import GraphView
from pipepart.report.live_state import LIVE, LiveState, load_live
from pipepart.report.run_folder import locate
from pipepart.schedule import make_schedule, read_csv, to_csv
from tools.bench.fuzz.mutate import garbled, junk, mutated

__all__ = ["Part", "make_parts", "special_files"]

_SIMULATED = 2_000
"""Micro-batches times chunks up to which an accepted plan is simulated as well."""
_CLUSTER = {
    "name": "small",
    "devices": {"card": {"flops": {"float32": 1e12}, "memory_bandwidth": 1e11, "memory": 8e9, "efficiency": 0.5}},
    "links": {"bus": {"bandwidth": 1e10, "latency": 1e-6}},
    "nodes": [{"count": 2, "devices": {"card": 2}, "link": "bus"}],
    "network": "bus",
}
_NODE = {"supportedOnFpga": 1, "cpuLatency": 1, "fpgaLatency": 1, "isBackwardNode": 0, "colorClass": 1, "size": 7}
_OPERATORS = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [{"id": number, **_NODE} for number in range(3)],
    "edges": [{"sourceId": 0, "destId": 1, "cost": 0.5}, {"sourceId": 1, "destId": 2, "cost": 0.25}],
}
_INDEX = {"metadata": {"total_size": 40}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
_PROFILE = b"""\
node2 -- Linear(2, 2) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=[16.0; 4.0], parameter_size=24.0
node1 -- Input0 -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=8.0, parameter_size=0.0
\tnode1 -- node2
"""


_STATE = LiveState("run", 1, "host", 1.0, 2.0).at(1, {"loss": 1.0}, [1.0], {"bubble": 0.5})


@dataclass(frozen=True)
class Part:
    """A reader or a set of options."""

    name: str
    weight: int
    """The share of the cases that it gets."""
    draw: Callable[[random.Random], Any]
    run: Callable[[Any], object]
    file: Path | None = None
    """The file of a reader, which is written for each case."""
    read: Callable[[Path], object] | None = None
    limit: float = 2.0
    """Processor seconds of a case."""


def _reader(name: str, weight: int, file: Path, document: Any, read: Callable[[Path], object]) -> Part:
    """A reader of a file: its valid document, or its valid text, is mutated."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()

    def draw(random_: random.Random) -> Any:
        if isinstance(document, bytes) or random_.random() < 0.3:
            return garbled(text, random_)
        changed = mutated(document, random_)
        return mutated(changed, random_) if random_.random() < 0.3 else changed

    def run(case: Any) -> object:
        with open(file, "wb") as target:
            target.write(case if isinstance(case, bytes) else json.dumps(case).encode())
        return read(file)

    run(document)  # the valid document is taken
    return Part(name, weight, draw, run, file, read)


def _options(name: str, weight: int, names: list[str], make: Callable[..., object]) -> Part:
    def draw(random_: random.Random) -> Any:
        return {random_.choice(names): junk(random_) for _ in range(random_.randrange(1, 4))}

    return Part(name, weight, draw, lambda case: make(**case))


def _plan_of(path: Path) -> object:
    found = Plan.load(path)
    if found.microbatches * len(found.chunks) <= _SIMULATED and found.replicas <= _SIMULATED:
        assert found.describe()
        assert found.step_time >= 0
    return found


def _written(folder: Path, write: Callable[[Path], object]) -> Any:
    path = folder / "valid.json"
    write(path)
    return json.loads(path.read_text())


def _reader_parts(folder: Path) -> list[Part]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    captured = capture(_Loss(model), (torch.randn(8, 4), torch.randn(8, 1)))
    made = plan(captured, cluster="a100_80", devices=2, stages=2, microbatches=2, cost="analytic")
    costs = OpCosts(
        ("a", "b"), (1.0, 2.0), (0.5, 0.25), (0.0, 1.0), (4, 8), (1, 2), (3, 5), "x", (0.0, 0.1), ((1,), ())
    )
    kept = this_machine.MeasuredMachine(
        load_cluster(_cluster_file(folder)).devices[0], this_machine.LinkKind("bus", 1e10, 1e-6), 2, this_machine._key()
    )
    limits._file = lambda _: folder / "products.json"  # type: ignore[assignment]
    manifest = folder / "last.ckpt"
    manifest.write_bytes(b"weights")
    reason = {"rank": 1, "when": 2.5, "echo": False, "known": True, "text": "lost", "where": "here"}
    logs = folder / "logs"
    logs.mkdir()
    weights, content = folder / "weights", safetensors_bytes({"a": torch.ones(2, 3), "b": torch.ones(4)})
    weights.mkdir()
    (weights / "model-1.safetensors").write_bytes(content)
    trace, graph, account = folder / "trace.json", folder / "graph.json", folder / "account.json"
    actions = to_csv(make_schedule("interleaved", stages=2, microbatches=4, chunks=2))
    by_file = {
        **_written(folder, made.save),
        "schedule": "file", "placement": [0, 1, 0, 1], "microbatches": 4, "actions": actions,
    }  # fmt: skip
    by_file["chunks"] = [{**by_file["chunks"][0], "stage": stage} for stage in by_file["placement"]]
    by_file["traffic"] = []
    return [
        _reader("plan", 20, folder / "plan.json", _written(folder, made.save), _plan_of),
        _reader("plan with actions", 5, folder / "actions.json", by_file, _plan_of),
        _reader("trace", 15, trace, _written(folder, lambda p: save_timeline(p, made.timeline)), load_timeline),
        _reader("graph", 15, graph, _written(folder, lambda p: save_graph(p, GraphView.from_names(made.ops))), load_graph),
        _reader("account", 10, account, _written(folder, lambda p: save_account(p, _account_of(made))), load_account),
        _reader("costs", 20, folder / "costs.json", _written(folder, lambda p: write_costs(p, costs)), read_costs),
        _reader("cluster", 1, folder / "cluster.yaml", _CLUSTER, load_cluster),
        _reader("operator graph", 15, folder / "operators.json", _OPERATORS, read_graph),
        _reader("layer profile", 15, folder / "profile.txt", _PROFILE, read_graph),
        _reader("schedule", 15, folder / "schedule.csv", actions.encode(), read_csv),
        _reader("run folder", 10, folder / "any.json", {"pipepart": "plan", "chunk_of": []}, locate),
        _reader("kept costs", 15, folder / "kept.json", asdict(costs), lambda p: cache._kept(p, costs.names)),
        _reader("kept machine", 15, folder / "machine.json", asdict(kept), this_machine._kept),
        _reader(
            "kept products", 15, folder / "products.json", {"works": ["float16"], "limit": {}, "cpu": "x"},
            lambda _: limits._kept(("", "")),
        ),
        _reader(
            "manifest", 10, folder / "last.ckpt.sha256", {"files": {"last.ckpt": [asdict(Content.of(manifest))]}},
            lambda _: verify(manifest),
        ),
        _reader("reason of a rank", 15, logs / "failure-rank1.json", reason, lambda _: _shown_reasons(logs)),
        _reader("index of weights", 10, weights / INDEX, _INDEX, lambda _: list(SafetensorsWeights(weights).values())),
        _reader("weights", 10, folder / "w.safetensors", content, lambda p: list(SafetensorsWeights(p).values())),
        _reader("exported weights", 10, folder / "exported.safetensors", _exported(), read_weights),
        _reader("state of a job", 10, folder / LIVE, asdict(_STATE), lambda _: load_live(folder)),
        _reader("result", 15, folder / "result.json", {"metrics": {"loss": 1.0}}, lambda _: read_result(folder)),
    ]  # fmt: skip


def _account_of(made: Plan) -> Account:
    found = account_of(made, made.timeline, MeanStep(9, 3e-1, 2e-1, 5e-2, 1e-2))
    assert found is not None
    return found


def _exported() -> bytes:
    """A file as `pipepart export --to safetensors --quantize int4` writes it."""
    found = narrowed(torch.ones(16, 16), 4)
    told = {
        "pipepart.tied": json.dumps({"b": "a"}),
        "pipepart.narrow": json.dumps({"a": {"bits": 4, "shape": [16, 16]}}),
    }
    return safetensors_bytes({"a.codes": found.codes, "a.scale": found.scale}, metadata=told)


class _Loss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.model(x) - y).square().mean()


def _cluster_file(folder: Path) -> Path:
    path = folder / "devices.yaml"
    path.write_text(json.dumps(_CLUSTER))
    return path


def _shown_reasons(logs: Path) -> None:
    for reason in _reasons(logs):
        _reason_text(reason, logs)


def _option_parts(folder: Path) -> list[Part]:
    base = checked(compose_config(["recipe=mlp", f"output={folder / 'run'}"]))
    target = [field.name for field in fields(Target) if field.name not in ("context", "each_replica", "variant")]
    captured = capture(_Loss(torch.nn.Linear(4, 1)), (torch.randn(8, 4), torch.randn(8, 1)))
    usual: dict[str, Any] = {"cluster": str(_cluster_file(folder)), "cost": "analytic", "devices": 2}

    def check(case: dict[str, Any]) -> object:
        with explaining(None, Exception):  # as in `compose_config`
            config = OmegaConf.merge(OmegaConf.structured(TrainConfig), case)
        return ready(checked(config))

    def planned(**case: Any) -> object:
        return plan(captured, **{**usual, **case})

    return [
        _options("PipelineStrategy", 10, [*StrategyOptions.names()], PipelineStrategy),
        _options("Options", 20, [*Options.names()], Options),
        _options("PlanOptions", 20, [*PlanOptions.names()], PlanOptions),
        replace(_options("plan()", 1, [*PlanOptions.names(), *target], planned), limit=120.0),  # a search may be long
        Part("pipepart train", 1, lambda draw: mutated(base, draw), check),
    ]


def make_parts(folder: Path) -> list[Part]:
    """All parts; their files are in the folder."""
    return [*_reader_parts(folder), *_option_parts(folder)]


def special_files() -> dict[str, Callable[[Path], None]]:
    """Kinds of files that are no texts, by the function that puts one in the place of a file."""

    def sparse(path: Path) -> None:
        with open(path, "wb") as file:
            file.truncate(10 * 2**30)

    def deep(path: Path) -> None:
        path.write_text("[" * 200_000)

    return {
        "a directory": lambda path: path.mkdir(),
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "a pipe": lambda path: os.mkfifo(path),
        "10 GB": sparse,
        "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00"),
        "deep nesting": deep,
        "a link to itself": lambda path: path.symlink_to(path.name),
    }
