"""`pipepart predict`: the outputs of a checkpoint for the rows of a file, in their order, in each format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.saved_runs import saved_run

from pipepart.cli.main import main

SMALL = ["recipe=mlp", "model.width=16"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def predict(*words: str) -> int:
    return main(["predict", "run", *words])


def refusal(capsys, *words: str) -> str:
    assert predict(*words) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_every_format_gives_the_rows_in_order(tmp_path: Path, capsys) -> None:
    module = saved_run(tmp_path / "run", *SMALL)
    points = torch.randn(23, 2)
    expected = module.net(points)
    lines = "\n".join(",".join(map(repr, row)) for row in points.tolist())
    Path("points.csv").write_text("first,second\n" + lines + "\n")
    Path("points.jsonl").write_text("\n".join(json.dumps({"input": row}) for row in points.tolist()))
    Path("lists.jsonl").write_text("\n".join(map(json.dumps, points.tolist())))
    np.save("points.npy", points.numpy())
    save_file({"any_name": points}, "points.safetensors")
    assert predict("points.csv", "--batch", "7") == 0  # the last batch is smaller
    assert "23 rows" in capsys.readouterr().out
    assert predict("points.jsonl", "-o", "lines.jsonl") == 0
    assert predict("lists.jsonl", "-o", "array.npy", "--batch", "5") == 0
    assert predict("points.npy", "-o", "tensors.safetensors") == 0
    assert predict("points.safetensors", "-o", "again.csv", "--batch", "1") == 0
    found = [
        torch.from_numpy(np.loadtxt("points-predictions.csv", delimiter=",")),
        torch.tensor([json.loads(line)["output"] for line in Path("lines.jsonl").read_text().splitlines()]),
        torch.from_numpy(np.load("array.npy")),
        load_file("tensors.safetensors")["output"],
        torch.from_numpy(np.loadtxt("again.csv", delimiter=",")),
    ]
    for values in found:
        assert torch.allclose(values.double(), expected.double(), atol=1e-6)


@pytest.mark.slow
def test_rows_of_several_inputs_and_lengths(tmp_path: Path) -> None:
    module = saved_run(tmp_path / "run", "recipe=rnn", "model.layers=1", "model.width=16")
    words = [torch.randint(97, 103, (length,)) for length in (5, 5, 3, 9, 9, 9, 5)]
    Path("words.jsonl").write_text("\n".join(json.dumps({"words": word.tolist()}) for word in words))
    assert predict("words.jsonl", "--batch", "2") == 0
    lines = Path("words-predictions.jsonl").read_text().splitlines()
    assert len(lines) == len(words)
    for word, line in zip(words, lines):
        assert torch.allclose(torch.tensor(json.loads(line)["output"]), module(word[None])[0], atol=1e-5)


def test_wrong_files_are_refused_and_an_earlier_output_stays(tmp_path: Path, capsys) -> None:
    saved_run(tmp_path / "run", "recipe=gpt", "model.depth=1", "model.width=16", "data.context=8")
    Path("old.jsonl").write_text("kept")

    def said(name: str, text: str, *words: str) -> str:
        Path(name).write_text(text)
        return refusal(capsys, name, "-o", "old.jsonl", *words)

    row = json.dumps([1] * 8)
    assert "line 2: x takes whole numbers" in said("a.jsonl", f"{row}\n{json.dumps([0.5] * 8)}")
    assert "line 1 is not JSON" in said("b.jsonl", "{")
    assert "expected numbers in lists of equal lengths" in said("c.jsonl", '[["a"], [1, 2]]')
    assert "has 'y'; expected x" in said("d.jsonl", json.dumps({"y": [1] * 8}))
    assert "a row has 2 dimensions; expected 1" in said("e.jsonl", "[[1, 2]]")
    assert "GPT fails for the rows 2 to 2: IndexError" in said(
        "f.jsonl", f"{row}\n{json.dumps([999] * 8)}", "--batch", "1"
    )
    assert "there are no rows" in said("g.jsonl", "")
    assert "is not a number" in said("h.csv", "1,2\n1,b")
    assert "cannot be read" in said("i.npy", "nothing")
    assert "inputs are read from" in said("j.txt", "")
    assert "--batch" in said("a.jsonl", row, "--batch", "0")
    assert "there is no file" in refusal(capsys, "gone.csv")
    assert "outputs are written to" in refusal(capsys, "a.jsonl", "-o", "out.txt")
    assert Path("old.jsonl").read_text() == "kept"
    assert not list(tmp_path.glob("*.part"))
