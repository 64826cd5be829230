"""`pipepart export`: which module of which checkpoint is exported, and what is refused before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from support.saved_runs import saved_run

from pipepart import PipelineStrategy, consolidate
from pipepart.cli.config import checked, compose_config
from pipepart.cli.fit import build_recipe
from pipepart.cli.main import main
from pipepart.export import read_checkpoint, read_weights

SMALL = ["recipe=mlp", "model.width=16"]
MODELS = """
import lightning as L
import torch
from torch import nn

class Mine(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(8, width)
        self.example_input_array = torch.randn(4, 8)

    def forward(self, x):
        return self.net(x).relu()

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 8))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)

class TwoParts(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

def make():
    return Plain(), (torch.randn(4, 8),)

def wrong():
    return Plain()
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_models", None)


def export(*words: str) -> int:
    return main(["export", *words])


def exported(*words: str) -> dict[str, torch.Tensor]:
    assert export(*words, "--to", "safetensors", "-o", "out.safetensors") == 0
    return read_weights("out.safetensors")


def refusal(capsys, *words: str) -> str:
    assert export(*words) == 2
    return capsys.readouterr().err


def test_a_run_folder_and_a_copy_of_its_checkpoint(tmp_path: Path, capsys) -> None:
    module = saved_run(tmp_path / "run", *SMALL)
    expected = module.net.state_dict()
    for words in (["run"], ["run/checkpoints/last.ckpt"]):
        found = exported(*words)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "input float32 [batch, 2]" in capsys.readouterr().out  # as the parameter of Sequential.forward
    (tmp_path / "elsewhere.ckpt").write_bytes((tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes())
    assert "there is no config.yaml of a run" in refusal(capsys, "elsewhere.ckpt", "--to", "pt2")
    assert exported("elsewhere.ckpt", *SMALL).keys() == expected.keys()
    said = refusal(capsys, "elsewhere.ckpt", "--to", "pt2", "recipe=mlp", "model.width=8")
    assert "do not fit MLPModule" in said and "size mismatch" in said


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    config = checked(compose_config([*SMALL, "data.samples=128"]))
    module, data = build_recipe(config)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        limit_val_batches=0, strategy=PipelineStrategy(stages=1, microbatches=1, sharded=True),
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "sharded.ckpt")
    assert (tmp_path / "sharded.ckpt").is_dir()
    consolidate(tmp_path / "sharded.ckpt", tmp_path / "plain.ckpt")
    plain, sharded = (read_checkpoint(tmp_path / name) for name in ("plain.ckpt", "sharded.ckpt"))
    assert plain.keys() == sharded.keys()
    found = exported("sharded.ckpt", *SMALL)
    assert all(torch.equal(found[name], value) for name, value in module.net.state_dict().items())
    next((tmp_path / "sharded.ckpt").glob("*.distcp")).write_bytes(b"cut off")
    assert export("sharded.ckpt", *SMALL, "--to", "pt2") == 2


def test_classes_and_functions_of_the_user(tmp_path: Path, capsys) -> None:
    import my_models

    module = my_models.Mine(width=16)
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, max_steps=0)
    trainer.strategy.connect(module)
    trainer.save_checkpoint("mine.ckpt")
    assert torch.equal(exported("mine.ckpt", "--class", "my_models:Mine")["net.weight"], module.net.weight)
    torch.save({"inside.weight": torch.ones(16, 8)}, "state.pt")  # the state dict of a larger module
    assert torch.equal(exported("state.pt", "--class", "my_models:make")["weight"], torch.ones(16, 8))
    words = ["state.pt", "--to", "pt2", "--class"]
    assert "expected (module, tuple of example arguments)" in refusal(capsys, *words, "my_models:wrong")
    assert "no attribute 'Gone'" in refusal(capsys, *words, "my_models:Gone")
    assert "cannot be built with the hyper-parameters" in refusal(capsys, *words, "my_models:Mine")
    assert "are not those of TwoParts" in refusal(capsys, *words, "my_models:TwoParts")
    torch.save({"weight": torch.ones(16, 8)}, "plain.pt")
    assert "has no example_input_array" in refusal(capsys, "plain.pt", "--to", "pt2", "--class", "my_models:Plain")
    torch.save(my_models.TwoParts().state_dict(), "two.pt")
    said = refusal(capsys, "two.pt", "--to", "pt2", "--class", "my_models:TwoParts")
    assert "2 submodules with parameters (first, second)" in said and "--module" in said


def test_wrong_requests_are_refused(tmp_path: Path, capsys) -> None:
    saved_run(tmp_path / "run", *SMALL)
    assert "there is no such format" in refusal(capsys, "run", "--to", "onxx")
    assert "--quantize int7" in refusal(capsys, "run", "--to", "onnx", "--quantize", "int7")
    assert "--to hf takes no --quantize int8" in refusal(capsys, "run", "--to", "hf", "--quantize", "int8")
    assert "is not a model of the transformers library" in refusal(capsys, "run", "--to", "hf")
    assert "has no such module" in refusal(capsys, "run", "--to", "pt2", "--module", "nett")
    assert "there is no checkpoint gone" in refusal(capsys, "gone", "--to", "pt2")
    assert "a folder without a checkpoint" in refusal(capsys, ".", "--to", "pt2")
    torch.save([1, 2], "list.pt")
    assert "is not a checkpoint" in refusal(capsys, "list.pt", "--to", "pt2", *SMALL)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("allow: []", "allow: [my_models]"))
    assert "only the command line can allow packages" in refusal(capsys, "run", "--to", "pt2")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["last.ckpt"]
