"""Fabric: programs with a step as a function equal one device, at every shape; what cannot work is refused by name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from fabric_programs import accumulate, data, gathered, loader_of, make, one_device, pipelined, train
from lightning.fabric import Fabric
from support.ranks import error_of, run_ranks
from torch import nn

from pipepart import PipelineStrategy

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Stages and replicas."""


def _fabric(stages: int, devices: int, kind: Any = Fabric, **options: Any) -> Any:
    fabric = kind(
        accelerator="cpu", devices=devices, strategy=PipelineStrategy(stages=stages, microbatches=2), **options
    )
    fabric.launch()
    return fabric


def _both(folder: str, stages: int, devices: int) -> list[dict[str, Any]]:
    """All that a pair of programs does on this rank."""
    first = train(_fabric(stages, devices), folder)
    resumed = train(_fabric(stages, devices), folder, 2, resume=f"{folder}/other.ckpt")
    return [first, accumulate(_fabric(stages, devices)), resumed]


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name == "state":
            assert found[name].keys() == value.keys()
            for key, tensor in value.items():
                torch.testing.assert_close(found[name][key], tensor, rtol=1e-9, atol=1e-11)
        else:
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-11), name


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("one_device")
    results = [one_device(train, str(folder)), one_device(accumulate)]
    steps = len(results[0]["losses"]) // 2
    later = {
        **{key: results[0][key][steps:] for key in ("losses", "norms", "correct")},
        "state": results[0]["state"],
    }
    return folder, [*results, later]


@pytest.mark.parametrize(("stages", "replicas"), SHAPES)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_programs_equal_one_device(
    stages: int, replicas: int, tmp_path: Path, reference: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Training with clipping and validation, accumulation without exchange, and a checkpoint of one device continued."""
    folder, expected = reference
    (tmp_path / "other.ckpt").write_bytes((folder / "0.ckpt").read_bytes())
    devices = stages * replicas
    answers = run_ranks(devices, _both, str(tmp_path), stages, devices, timeout=240)
    for rank, answer in enumerate(answers):
        for found, wanted in zip(answer, expected):
            if rank:  # the state of the whole model is on rank 0
                found, wanted = ({k: v for k, v in part.items() if k != "state"} for part in (found, wanted))
            _same(found, wanted)
    saved, plain = (torch.load(path / "1.ckpt", weights_only=True) for path in (tmp_path, folder))
    assert saved["epoch"] == 2 and saved["scheduler"] == plain["scheduler"]
    _same({"state": saved["model"]}, {"state": dict(plain["model"])})
    for number, state in plain["optimizer"]["state"].items():
        _same({"state": saved["optimizer"]["state"][number]}, {"state": state})


def _refused(stages: int, devices: int) -> dict[str, str]:
    fabric = _fabric(stages, devices)
    model, optimizer = fabric.setup(*make())
    x, y = next(iter(loader_of(fabric)))

    def criterion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    early = error_of(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0))
    found = {"early": early, "eager": error_of(lambda: criterion(model(x), y))}
    step = fabric.strategy.step(lambda x, y: criterion(model(x), y))
    loss = step(x, y)
    found["foreign"] = error_of(fabric.backward, torch.ones((), requires_grad=True) * 2)
    fabric.backward(loss)
    found["twice"] = error_of(fabric.backward, loss)
    found["loss.backward()"] = error_of(step(x, y).backward)
    found["norm"] = error_of(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1.0))
    found["second"] = error_of(fabric.setup, nn.Linear(2, 2))
    found["inside"] = error_of(fabric.strategy.step(lambda x, y: fabric.backward(criterion(model(x), y))), x, y)
    found["log"] = error_of(fabric.strategy.step(lambda x, y: fabric.log("loss", criterion(model(x), y))), x, y)
    found["no loss"] = error_of(fabric.strategy.step(lambda x: model(x)), x)
    found["closure"] = error_of(optimizer.step, lambda: None)
    replica = fabric.strategy.distributed_sampler_kwargs["rank"] if devices > stages else 0
    found["factors"] = error_of(fabric.backward, step(x, y) * (1 + replica))
    optimizer.zero_grad()
    with fabric.no_backward_sync(model):
        fabric.backward(step(x, y))
        found["not exchanged"] = error_of(optimizer.step)
    found["options"] = error_of(
        lambda: Fabric(accelerator="cpu", devices=devices, strategy=PipelineStrategy(sharded=True))
    )
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_cannot_work_is_refused_by_name() -> None:
    for found in run_ranks(2, _refused, 1, 2, timeout=150):
        assert "@fabric.strategy.step" in found["eager"] and "Language was called outside of a step" in found["eager"]
        assert "comes from no step" in found["foreign"] and "handed over already" in found["twice"]
        assert "Call fabric.backward(loss)" in found["loss.backward()"]
        assert "norm_type=1.0" in found["norm"] and "planned at the first call of a step" in found["early"]
        assert "second model" in found["second"]
        assert "returned no loss" in found["no loss"] and "torch.no_grad()" in found["no loss"]
        assert "closure" in found["closure"]
        assert "return the loss, and call fabric.backward(loss) after the step" in found["inside"]
        assert "log it after the step" in found["log"]
        assert "different factors on the replicas" in found["factors"]
        assert "no_backward_sync" in found["not exchanged"]
        assert "sharded is an option for a Trainer" in found["options"]


def _other_uses(folder: str) -> dict[str, Any]:
    """Mixed precision, `lightning_fabric`, the strategy by its name, evaluation first, and the module made whole."""
    import lightning_fabric

    fabric = _fabric(2, 2, lightning_fabric.Fabric, precision="bf16-mixed")
    model, optimizer = fabric.setup(*make(dtype=torch.float32))
    x, y = (tensor[:8] for tensor in data().tensors)
    with torch.no_grad():
        before = model(x)
    step = fabric.strategy.step(lambda x, y: nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    loss = step(x, y)
    fabric.backward(loss)
    optimizer.step()
    whole = gathered(fabric, model)
    fabric.strategy.make_whole()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    named = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy="pipepart")
    kinds = [kind.__module__ for kind in type(named.strategy).__mro__]
    return {"before": before, "loss": loss.detach(), "whole": whole, "own": own, "kinds": kinds}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_mixed_precision_the_other_package_and_the_whole_module(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    model, optimizer = fabric.setup(*make(dtype=torch.float32))
    x, y = (tensor[:8] for tensor in data().tensors)
    before = model(x).detach()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    fabric.backward(loss)
    optimizer.step()
    answers = run_ranks(2, _other_uses, str(tmp_path), timeout=150)
    for answer in answers:
        assert answer["before"].dtype == torch.float32
        torch.testing.assert_close(answer["before"], before)
        torch.testing.assert_close(answer["loss"], loss.detach(), rtol=1e-5, atol=1e-6)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(answer["own"][name], value.detach(), rtol=1e-2, atol=1e-3)
        assert "lightning_fabric.strategies.parallel" in answer["kinds"]
        assert "lightning.fabric.strategies.parallel" not in answer["kinds"]
    for name, value in answers[0]["whole"].items():
        assert torch.equal(value, answers[1]["own"][name])


class _Lit(L.LightningModule):
    """A LightningModule under Fabric, whose steps take several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    validation_step = training_step


def _lit(stages: int, devices: int) -> list[float]:
    fabric = _fabric(stages, devices) if stages else Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(3)
    model, optimizer = fabric.setup(module := _Lit(), torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
    x, y = torch.randn(10, 4, dtype=torch.float64), torch.randint(0, 3, (10,))
    run = pipelined(fabric, lambda batch, number: model.training_step(batch, number))
    found = []
    for number, size in enumerate((8, 8, 5, 10)):
        optimizer.zero_grad()
        loss = run((x[:size], y[:size]), number)
        fabric.backward(loss)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found += [loss.item(), model.validation_step((x, y), number).item(), float(model(x).sum())]
            found.append(float(run((x, y), number)))
        model.train()
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_steps_of_a_lightning_module_and_batches_of_other_sizes() -> None:
    expected = _lit(0, 1)
    for found in run_ranks(2, _lit, 2, 2, timeout=150):
        assert found == pytest.approx(expected, rel=1e-10)


PAGE = Path(__file__).parents[2] / "docs" / "fabric.md"


def _page(folder: str) -> list[float]:
    before = os.getcwd()
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    os.chdir(folder)
    try:
        exec(compile(program, str(PAGE), "exec"), names)
    finally:
        os.chdir(before)  # the process runs other tests
    return [names["loss"].item(), float(names["correct"])]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_program_of_the_page(tmp_path: Path) -> None:
    [first, second] = run_ranks(2, _page, str(tmp_path), timeout=150)
    assert first == second and 0 < first[0] < 3 and 0 <= first[1] <= 64
    saved = torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)
    assert saved["epoch"] == 1 and len(saved["model"]) == 6 and len(saved["optimizer"]["state"]) == 6
