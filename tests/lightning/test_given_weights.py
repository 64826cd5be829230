"""Weights that a module brings along: read from safetensors by the stage that needs them, written by it, faults named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.ranks import error_of, run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import QUIET, Notes

from pipepart import ConfigError, PipelineStrategy
from pipepart.lightning import SafetensorsWeights, materialise, save_weights

WIDTH = 16


class Net(nn.Module):
    """Tied weights, a buffer in checkpoints and one that is not, and a head that the files do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.out = nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.layers(self.tokens(x)) + self.shift
        return self.out(h), self.head(h)


class Module(L.LightningModule):
    def __init__(self, source: Callable[[], Any], result: str | None = None) -> None:
        super().__init__()
        self.source, self.result, self.net = source, result, None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = Net().double()

    def configure_weights(self) -> Any:
        self.found = self.source()
        return self.found

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        scores, classes = self.net(batch)
        return F.cross_entropy(scores.flatten(0, 1), batch.flatten()) + F.cross_entropy(classes[:, 0], batch[:, 0] % 3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_end(self) -> None:
        if self.result is not None:
            save_weights(self.trainer, self.result, _plain, shard_bytes=2500)


FRESH = ["net.head.weight", "net.head.bias"]


def _plain(part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("net."): value for name, value in part.items() if name != "net.out.weight"}


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state = Net().state_dict()
    state["shift"].normal_()
    return {name: value for name, value in state.items() if not name.startswith(("head", "tokens"))}


def _write(folder: Path, state: dict[str, torch.Tensor]) -> str:
    """Two files in float32 and their index. The tied weight has its second name."""
    folder.mkdir()
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(state)}
    for file in set(places.values()):
        save_file({name: value for name, value in state.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(folder)


def _data() -> DataLoader:
    return DataLoader(torch.arange(96).view(16, 6) * 7 % 11, batch_size=8)


def _source(folder: str, fresh: list[str] = FRESH) -> Any:
    return SafetensorsWeights(folder, prefix="net.", fresh=fresh)


def _fit(folder: str, stages: int, result: str) -> dict[str, Any]:
    torch.manual_seed(9)
    module, notes = Module(lambda: _source(folder), result), Notes()
    strategy = PipelineStrategy(stages=stages, microbatches=2, schedule="1f1b", split_at=["net.layers.2"])
    trainer = L.Trainer(strategy=strategy, devices=stages, max_epochs=2, callbacks=[notes], **QUIET)
    trainer.fit(module, _data())
    own = {name: p.numel() for name, p in module.named_parameters() if not p.is_meta and name not in FRESH}
    held = sum(4 * number for number in own.values())
    held += sum(4 * WIDTH for name, buffer in module.named_buffers() if not buffer.is_meta)
    return {"losses": notes.losses, "read": module.found.bytes_read, "held": held}


def test_read_and_written_by_stages(tmp_path: Path) -> None:
    """As in one process that reads everything; each rank reads what it holds, and writes what it is the home of."""
    state = _state()
    folder, result = _write(tmp_path / "weights", state), tmp_path / "result"
    torch.manual_seed(9)
    alone, notes = Module(lambda: _source(folder)), Notes()
    alone.configure_model()
    materialise(alone)
    assert torch.equal(alone.net.tokens.weight, state["out.weight"].double()), "the tied weight, by its other name"
    assert torch.equal(alone.net.shift, state["shift"].double())
    trainer = L.Trainer(max_epochs=2, callbacks=[notes], **QUIET)
    trainer.fit(alone, _data())
    result.mkdir()
    (result / "old").touch()
    answers = run_ranks(2, _fit, folder, 2, str(result))
    whole = sum(value.nbytes for value in state.values())
    for answer in answers:
        assert answer["losses"] == pytest.approx(notes.losses, rel=1e-9)
        assert answer["read"] == answer["held"] < whole
    assert whole == sum(answer["read"] for answer in answers) - state["out.weight"].nbytes, (
        "the tied one is on both stages"
    )
    index = json.loads((result / "model.safetensors.index.json").read_text())
    files = {file: load_file(result / file) for file in set(index["weight_map"].values())}
    assert {path.name for path in result.iterdir()} == {*files, "model.safetensors.index.json"}
    assert len(files) > 2
    saved = {name: files[file][name] for name, file in index["weight_map"].items()}
    expected = _plain({f"net.{name}": value for name, value in alone.net.state_dict().items()})
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-9, atol=1e-12)


def _changed(**changes: Any) -> dict[str, torch.Tensor]:
    state = {**_state(), **changes}
    return {name: value for name, value in state.items() if value is not None}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"layers.1.0.bias": None}, "the weights lack 'net.layers.1.0.bias', which Module has"),
    "unknown": ({"extra": torch.zeros(2)}, "the weights have 'net.extra', which Module does not have"),
    "shape": ({"shift": torch.zeros(3)}, r"net.shift has the shape \(3,\) in the weights, and \(16,\) in the module"),
    "dtype": ({"shift": torch.zeros(WIDTH, dtype=torch.long)}, "net.shift has the dtype torch.int64 in the weights"),
    "tied": (
        {"tokens.weight": torch.zeros(11, WIDTH)},
        "net.tokens.weight and net.out.weight are tied in Module, but the weights have different values",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    changes, text = FAULTS[fault]
    folder = _write(tmp_path / "weights", _changed(**changes))
    module = Module(lambda: _source(folder))
    module.configure_model()
    with pytest.raises(ConfigError, match=text):
        materialise(module)
    with pytest.raises(ConfigError):  # the module is not filled in another way
        materialise(module)


def test_weights_that_would_not_be_used_are_refused(tmp_path: Path) -> None:
    """A module that was built with values; but not one whose weights were read by an earlier run."""
    folder = _write(tmp_path / "weights", _state())
    module = Module(lambda: _source(folder))
    module.net = Net().double()
    strategy = PipelineStrategy(stages=1, microbatches=1)
    trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=1, **QUIET)
    with pytest.raises(ConfigError, match=r"the module was built with values, so they would not be used"):
        trainer.fit(module, _data())
    module = Module(lambda: _source(folder))
    module.configure_model()
    materialise(module)
    L.Trainer(strategy=PipelineStrategy(stages=1, microbatches=1), devices=1, max_epochs=1, **QUIET).fit(
        module, _data()
    )


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = Path(_write(tmp_path / "weights", _state()))
    with pytest.raises(ConfigError, match="has no tensor 'nothing'"):
        SafetensorsWeights(folder, names={"net.shift": "nothing"})
    file = folder / "model-1.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    weights = _source(str(folder))
    with pytest.raises(ConfigError, match=r"model-1.safetensors: the tensor .* cannot be read"):
        list(weights.values())
    file.unlink()
    with pytest.raises(ConfigError, match=r"names 'model-1.safetensors', which is not in the folder"):
        _source(str(folder))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ConfigError, match="is not the name of a file in this folder"):
        _source(str(folder))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"no weights in safetensors.*pytorch_model.bin"):
        _source(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="there is no file or folder"):
        _source(str(tmp_path / "nowhere"))


def _errors(folders: list[str]) -> list[str]:
    found = []
    for folder in folders:
        trainer = L.Trainer(
            strategy=PipelineStrategy(stages=2, microbatches=2, schedule="1f1b", split_at=["net.layers.2"]),
            devices=2, max_epochs=1, **QUIET,
        )  # fmt: skip
        found.append(error_of(trainer.fit, Module(lambda folder=folder: _source(folder)), _data()))
    return found


def _unwritten(folder: str, result: str) -> str:
    """Rank 1 cannot write: its tensors cannot be converted."""
    strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b", split_at=["net.layers.2"])
    module = Module(lambda: _source(folder))
    trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=1, **QUIET)
    trainer.fit(module, _data())

    def convert(part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if torch.distributed.get_rank() == 1:
            raise OSError("no space left")
        return part

    return error_of(save_weights, trainer, result, convert)


def test_a_rank_that_cannot_write_leaves_the_earlier_folder(tmp_path: Path) -> None:
    folder, result = _write(tmp_path / "weights", _state()), tmp_path / "result"
    result.mkdir()
    (result / "old").touch()
    for error in run_ranks(2, _unwritten, folder, str(result)):
        assert "the weights " in error
        assert "could not be written: no space left" in error
    assert [path.name for path in result.iterdir()] == ["old"]
    assert not (tmp_path / "result.part").exists()


def test_faults_are_named_on_all_ranks(tmp_path: Path) -> None:
    """Also one that only the rank finds that reads the tensor."""
    changes = {"missing": {"layers.3.0.weight": None}, "shape": {"layers.0.0.bias": torch.zeros(2)}}
    folders = [_write(tmp_path / name, _changed(**change)) for name, change in changes.items()]
    first, second = run_ranks(2, _errors, folders)
    assert first == second
    assert "lack 'net.layers.3.0.weight'" in first[0]
    assert "net.layers.0.0.bias has the shape (2,)" in first[1]


class Wide(L.LightningModule):
    """Much memory, little work."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            with torch.device("meta"):
                self.layers = nn.Sequential(*(nn.Linear(1280, 1280, bias=False) for _ in range(12)))

    def configure_weights(self) -> Any:
        self.found = SafetensorsWeights(self.folder, prefix="layers.")
        return self.found

    def training_step(self, batch, batch_idx):
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _number(file: str, key: str) -> int:
    return int(next(line for line in Path(file).read_text().splitlines() if line.startswith(key)).split()[1])


class Peak(L.Callback):
    """Until training starts: the memory of the process at most, more than at the beginning, and the bytes that it reads."""

    def setup(self, trainer, module, stage) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before, self.read = _number("/proc/self/status", "VmRSS") * 1024, _number("/proc/self/io", "rchar")

    def on_train_start(self, trainer, module) -> None:
        self.bytes = _number("/proc/self/status", "VmHWM") * 1024 - self.before
        self.read = _number("/proc/self/io", "rchar") - self.read


def _wide(folder: str) -> dict[str, int]:
    for _ in range(2):  # the first one brings in all that is only imported when used
        module, peak = Wide(folder), Peak()
        strategy = PipelineStrategy(stages=3, microbatches=2, split_at=["layers.4", "layers.8"])
        trainer = L.Trainer(strategy=strategy, devices=3, max_epochs=1, callbacks=[peak], **QUIET)
        trainer.fit(module, DataLoader(torch.randn(4, 1280), batch_size=4))
    own = sum(p.nbytes for p in module.parameters() if not p.is_meta)
    return {"own": own, "counted": module.found.bytes_read, "read": peak.read, "peak": peak.bytes}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to reset the peak")
def test_no_rank_reads_or_holds_the_whole_model(tmp_path: Path) -> None:
    """As the system counts it: the bytes that a process reads, and the peak of its memory."""
    state = {f"{number}.weight": torch.randn(1280, 1280) / 36 for number in range(12)}
    whole = sum(value.nbytes for value in state.values())
    answers = run_ranks(3, _wide, _write(tmp_path / "weights", state))
    assert sum(answer["own"] for answer in answers) == whole
    for answer in answers:
        assert answer["counted"] == answer["own"] < 0.5 * whole
        assert answer["own"] <= answer["read"] < answer["own"] + 0.1 * whole, answer
        assert answer["peak"] < answer["own"] + 0.35 * whole, answer
