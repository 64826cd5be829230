"""Measured costs: what can be said of them without trusting a clock."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipepart.capture import record
from pipepart.cost import profile, profiled


class Layers(nn.Module):
    """Two equal blocks with dropout and batch norm, so that there is state to disturb."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1)) for _ in range(2))
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 4)
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.second(self.first(x)))), y)


def batch(size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 32), torch.randint(0, 4, (size,))


def measured(model: nn.Module, size: int = 16):
    example = batch(size)
    recording = record(model, example)
    costs = profile(recording, recording.flatten(example))
    return costs, {name: i for i, name in enumerate(costs.names)}


def test_every_op_has_its_costs() -> None:
    costs, at = measured(Layers())
    linear = next(i for name, i in at.items() if "first_0" in name)
    second = next(i for name, i in at.items() if "second_0" in name)
    assert costs.source == "profile"
    assert costs.forward[linear] > 0
    assert costs.backward_weight[linear] > 0
    assert costs.parameter_bytes[linear] == (32 * 32 + 32) * 4
    # the input of the second linear is what it keeps for its weight gradient
    assert costs.saved_bytes[second] == 16 * 32 * 4
    assert costs.output_bytes[linear] == 16 * 32 * 4
    inputs = [i for name, i in at.items() if name in ("x", "y") or name.startswith("args")]
    assert all(costs.forward[i] == 0 for i in inputs)


def test_ops_of_one_kind_cost_the_same() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)), nn.Flatten(0))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).mean()

    recording = record(Loss(), (torch.randn(8, 32),))
    costs = profile(recording, recording.flatten((torch.randn(8, 32),)))
    linears = [i for i, name in enumerate(costs.names) if costs.parameter_bytes[i]]
    assert len(linears) == 5
    # the first one has no gradient to give to its input, so it is of another kind
    assert len({costs.forward[i] for i in linears[1:]}) == 1
    assert len({costs.backward_input[i] for i in linears[1:]}) == 1


def test_frozen_parameters_have_no_weight_part() -> None:
    costs, at = measured(Layers(frozen=True))
    linear = next(i for name, i in at.items() if "first_0" in name)
    assert costs.backward_weight[linear] == 0.0
    assert costs.backward_input[linear] == 0.0


def test_measuring_leaves_no_trace() -> None:
    model = Layers()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    example = batch()
    torch.manual_seed(5)
    recording = record(model, example)
    state = torch.get_rng_state()
    profile(recording, recording.flatten(example))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)


def test_the_whole_is_the_sum_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["pipepart.cost.profile"]  # the package has a function of that name
    monkeypatch.setattr(module, "_whole_step", lambda *_: (3.0, 5.0))
    costs, _ = measured(Layers())
    assert sum(costs.forward) == pytest.approx(3.0)
    assert sum(costs.backward) == pytest.approx(5.0)


def test_the_cache_gives_back_what_was_measured(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEPART_CACHE", str(tmp_path))
    example = batch()
    recording = record(Layers(), example)
    leaves = recording.flatten(example)
    first = profiled(recording, leaves)
    assert profiled(recording, leaves) == first
    assert len(list((tmp_path / "profiles").glob("*.json"))) == 1
    # another size, another precision: measured apart
    profiled(recording, [leaf[:8] for leaf in leaves])
    profiled(recording, leaves, variant="bf16")
    assert len(list((tmp_path / "profiles").glob("*.json"))) == 3
    # a broken file is measured again, not believed
    for path in (tmp_path / "profiles").glob("*.json"):
        path.write_text("{")
    assert profiled(recording, leaves).names == first.names


def test_what_was_kept_is_held_against_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a busy machine are not believed for ever, and all ranks decide alike."""
    monkeypatch.setenv("PIPEPART_CACHE", str(tmp_path))
    example = batch()
    recording = record(Layers(), example)
    leaves = recording.flatten(example)
    first = profiled(recording, leaves)
    (file,) = (tmp_path / "profiles").iterdir()
    kept = json.loads(file.read_text())
    kept["forward"] = [1.0 for _ in kept["forward"]]  # as if it had been a very busy machine
    file.write_text(json.dumps(kept))
    assert sum(profiled(recording, leaves).forward) == len(first.names)  # not asked
    said: list[bool] = []

    def agree(holds: bool) -> bool:
        said.append(holds)
        return holds

    again = profiled(recording, leaves, agree=agree)
    assert said == [False]
    assert sum(again.forward) < 1.0
    assert sum(json.loads(file.read_text())["forward"]) < 1.0
    others = profiled(recording, leaves, agree=lambda holds: False)  # it holds here, but not elsewhere: measured again
    assert others.names == first.names
