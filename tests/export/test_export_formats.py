"""Exported networks give what torch gives: ONNX in onnxruntime, folders of transformers, safetensors and pt2 programs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from support.saved_runs import saved_run

from pipepart.cli.main import main
from pipepart.export import CannotExport, Network, export_network, read_weights

RECIPES = ["gpt", "llama_hf", "vit", "resnet", "unet", "seq2seq"]
LETTERS = {"x": (5, 64), "input_ids": (5, 64), "question": (5, 24), "answer": (5, 23)}
SMALL = ["recipe=gpt", "model.depth=1", "model.width=32", "data.context=16"]


def inputs_of(names: list[str], pictures: bool = False) -> dict[str, torch.Tensor]:
    """Five rows for the inputs of a network, by their names."""
    torch.manual_seed(2)
    letters = {} if pictures else LETTERS
    return {name: torch.randint(200, letters[name]) if name in letters else torch.randn(5, 3, 32, 32) for name in names}


def outputs_of(part: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found = part(**given)
    return getattr(found, "logits", found)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_onnx_equals_torch_and_int8_is_small(recipe: str, tmp_path: Path, capsys) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    module = saved_run(tmp_path / "run", f"recipe={recipe}")
    part = getattr(module, "model", module)
    assert main(["export", str(tmp_path / "run"), "--to", "onnx"]) == 0
    file = tmp_path / "run" / "checkpoints" / "last.onnx"
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = inputs_of([value.name for value in session.get_inputs()], pictures=recipe == "unet")
    expected = outputs_of(part, given)
    (found,) = session.run(None, {name: value.numpy() for name, value in given.items()})
    assert np.abs(found - expected.numpy()).max() < 1e-4
    capsys.readouterr()

    assert (
        main(["export", str(tmp_path / "run" / "checkpoints" / "last.ckpt"), "--to", "onnx", "--quantize", "int8"]) == 0
    )
    small = file.with_name("last-int8.onnx")
    weights = sum({id(p): p.nbytes for p in part.parameters()}.values())
    assert os.path.getsize(small) * 2.5 < weights
    session = onnxruntime.InferenceSession(str(small), providers=["CPUExecutionProvider"])
    (rounded,) = session.run(None, {name: value.numpy() for name, value in given.items()})
    assert 0 < np.abs(rounded - expected.numpy()).mean() < 0.1 * expected.std()
    shown = capsys.readouterr().out
    row = next(line.split() for line in shown.splitlines() if line.startswith("onnx int8"))
    assert float(row[-1]) > 0 and float(row[-2]) >= float(row[-1])  # the mean and the largest difference
    assert sorted(path.name for path in file.parent.iterdir()) == ["last-int8.onnx", "last.ckpt", "last.onnx"]


def test_a_folder_for_from_pretrained_gives_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    module = saved_run(tmp_path / "run", "recipe=llama_hf", "model.depth=1", "model.width=32")
    assert main(["export", str(tmp_path / "run"), "--to", "hf", "-o", str(tmp_path / "folder")]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    given = inputs_of(["input_ids"])
    assert torch.equal(outputs_of(loaded.eval(), given), outputs_of(module.model, given))


def test_safetensors_hold_every_name_and_tied_weights_once(tmp_path: Path) -> None:
    module = saved_run(tmp_path / "run", *SMALL)
    assert main(["export", str(tmp_path / "run"), "--to", "safetensors"]) == 0
    file = tmp_path / "run" / "checkpoints" / "last.safetensors"
    found = read_weights(file)
    assert found.keys() == module.model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in module.model.state_dict().items())
    assert found["head.weight"].data_ptr() == found["tokens.weight"].data_ptr()
    assert os.path.getsize(file) < sum(p.nbytes for p in module.model.parameters()) + 10_000


@pytest.mark.parametrize(("bits", "near", "smaller"), [("int8", 0.005, 2.5), ("int4", 0.08, 4.0)])
def test_weights_in_fewer_bits(tmp_path: Path, bits: str, near: float, smaller: float) -> None:
    module = saved_run(tmp_path / "run", *SMALL, "model.width=64")
    assert main(["export", str(tmp_path / "run"), "--to", "safetensors", "--quantize", bits]) == 0
    file = tmp_path / "run" / "checkpoints" / f"last-{bits}.safetensors"
    assert os.path.getsize(file) * smaller < sum(p.nbytes for p in module.model.parameters())
    found = read_weights(file)
    for name, value in module.model.state_dict().items():
        assert (found[name] - value).abs().max() <= near * value.abs().max()
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [[], ["--quantize", "int8"], ["--quantize", "int4"]], ids=str)
def test_a_program_runs_without_the_code_of_the_model(tmp_path: Path, quantize: list[str]) -> None:
    module = saved_run(tmp_path / "run", *SMALL)
    assert main(["export", str(tmp_path / "run"), "--to", "pt2", *quantize, "-o", str(tmp_path / "program.pt2")]) == 0
    program = torch.export.load(tmp_path / "program.pt2").module()
    given = torch.randint(200, (5, 16))
    (found,) = program(given)
    expected = module.model(given)
    assert (found - expected).abs().mean() < (1e-5 if not quantize else 0.3 * expected.std())


class Counting(torch.nn.Module):
    """A network whose outputs depend on the number of its calls, which no exported program knows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(x) * self.calls


class Chosen(torch.nn.Module):
    """A network whose path depends on the values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if bool(x.sum() > 0) else x - 1


def test_what_differs_from_torch_is_refused_and_not_left(tmp_path: Path) -> None:
    network = Network.of(Counting(), (torch.randn(8, 4),), {})
    with pytest.raises(CannotExport, match=r"pt2 is refused: output of Counting differs from torch"):
        export_network(network, "pt2", tmp_path / "counting.pt2")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_refused_by_name(tmp_path: Path) -> None:
    network = Network.of(Chosen(), (torch.randn(8, 4),), {})
    with pytest.raises(CannotExport, match=r"Chosen cannot be exported: torch.export raised .*--to safetensors"):
        export_network(network, "pt2", tmp_path / "chosen.pt2")
    with pytest.raises(CannotExport, match=r"Chosen is not a model of the transformers library"):
        export_network(network, "hf", tmp_path / "chosen-hf")
    with pytest.raises(CannotExport, match=r"--to hf takes no --quantize int8"):
        export_network(network, "hf", tmp_path / "chosen-hf", "int8")
    half = Network.of(torch.nn.Linear(4, 4).bfloat16(), (torch.randn(8, 4).bfloat16(),), {})
    with pytest.raises(CannotExport, match=r"has weights in torch.bfloat16"):
        export_network(half, "onnx", tmp_path / "half.onnx")
    assert list(tmp_path.iterdir()) == []
