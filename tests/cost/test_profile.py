"""Measured costs: what can be said of them without trusting a clock."""

import copy
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipepart.cost import profile, profiled, state_kept
from pipepart.cost.op_costs import SPLIT_LAYERS
from pipepart.devices import Stopwatch
from pipepart.recording import record
from pipepart.runtime import deferred


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
    monkeypatch.setattr(module, "time_step", lambda *_: (3.0, 5.0))
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


def test_a_damaged_or_unwritable_cache_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEPART_CACHE", str(tmp_path))
    example = batch()
    recording = record(Layers(), example)
    leaves = recording.flatten(example)
    first = profiled(recording, leaves)
    (file,) = (tmp_path / "profiles").iterdir()
    good = json.loads(file.read_text())
    measured_again: list[bool] = []
    monkeypatch.setattr(sys.modules["pipepart.cost.cache"], "profile", lambda *_: measured_again.append(True) or first)
    assert profiled(recording, leaves) == first
    assert not measured_again
    changes: list[dict[str, object]] = [
        {"forward": [float("nan")] * len(first)}, {"forward": [-1.0] * len(first)}, {"forward": [1.0]}, {"forward": 1.0},
        {"savers": [[10**9]] * len(first)}, {"savers": 3}, {"names": ["x"]}, {"saved_bytes": ["1"] * len(first)}, {"more": 1},
    ]  # fmt: skip
    texts = ["", "{", "[]", "[" * 100_000 + "]" * 100_000, *(json.dumps({**good, **change}) for change in changes)]
    for count, text in enumerate(texts, 1):
        file.write_text(text)
        assert profiled(recording, leaves) == first
        assert len(measured_again) == count, text[:200]
        assert json.loads(file.read_text()) == good
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPEPART_CACHE", str(tmp_path / "file"))
    assert profiled(recording, leaves) == first


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


class SortedBack(nn.Module):
    """Sorts samples and puts them back by an index that is written into fresh memory, as layers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        order = hidden.sum(1).argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        kept = torch.empty_like(hidden)
        kept[:] = hidden
        kept.mul_(2)
        kept[:, 0].add_(1)
        return self.second(kept[order][back]).pow(2).mean()


def test_ops_are_measured_on_memory_that_was_written() -> None:
    costs = profile(recording := record(SortedBack(), (torch.randn(6, 8),)), recording.flatten((torch.randn(6, 8),)))
    assert not costs.notes
    # the gradient goes on through memory that an op has written into
    last = next(i for i, name in enumerate(costs.names) if name == "second")
    assert costs.backward_input[last] > 0


def test_inputs_that_a_model_changes_are_the_same_in_every_run() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            ids.add_(1)  # once more than once, and the last id is not in the table
            return self.table(ids).mean()

    ids = torch.tensor([0, 1, 2, 2])
    recording = record(Counts(), (ids,))
    assert not profile(recording, recording.flatten((ids,))).notes
    assert ids.tolist() == [0, 1, 2, 2]


class OnlyInAStep(torch.autograd.Function):
    """Its backward does not bear what it gets when it is run alone."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if bool((gradient == 1).all()):
            raise ValueError("all ones")
        return gradient * 2


def test_an_op_that_cannot_be_measured_gets_a_computed_cost_and_a_note() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(OnlyInAStep.apply(self.a(x))).pow(2).mean()

    example = (torch.randn(6, 8),)
    recording = record(Model(), example)
    costs = profile(recording, recording.flatten(example))
    (note,) = costs.notes
    assert "computed, not measured" in note
    assert "ValueError: all ones" in note
    op = costs.names.index("only_in_astep_apply")
    assert costs.forward[op] > 0
    assert costs.backward_input[op] > 0


CHANNELS_LAST = """
import torch
from torch import nn
from pipepart.recording import record
from pipepart.cost import profile

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.b(self.norm(self.a(x).to(memory_format=torch.channels_last))).pow(2).mean()

x = torch.randn(2, 3, 4, 4)
recording = record(Net(), (x,))
costs = profile(recording, recording.flatten((x,)))
assert not costs.notes, costs.notes
norm = costs.names.index("norm")
assert costs.backward[norm] > 0
print("measured")
"""


@pytest.mark.slow
class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.BatchNorm1d(8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) * self.scale).square().mean()


def test_a_model_that_does_not_fit_is_measured_with_the_parameters_of_one_op_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is on the host, and the meta device stands in for an accelerator."""
    model, x, there = Tower(), torch.randn(4, 8), torch.device("meta")
    recording = record(model, (x,))
    module = sys.modules["pipepart.cost.profile"]
    most: list[int] = []
    lent = module.lent

    @contextmanager
    def watched(modules, device):
        with lent(modules, device):
            most.append(sum(p.numel() for p in model.parameters() if p.device == there))
            yield

    monkeypatch.setattr(module, "lent", watched)
    monkeypatch.setattr(module, "time_step", lambda *_: pytest.fail("the whole step must not be run"))
    monkeypatch.setattr("pipepart.cost.timing.Stopwatch", lambda device: Stopwatch(torch.device("cpu")))
    own = {name: (tensor, tensor.clone()) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    costs = profile(recording, [x.to(there)])
    assert max(most) == 72, "the parameters of one layer"
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor is own[name][0]
        assert torch.equal(tensor, own[name][1])
    linears = [i for i, size in enumerate(costs.parameter_bytes) if size == 72 * 4]
    assert len(linears) == 4
    assert all(costs.forward[i] > 0 for i in linears)
    assert all(costs.backward_weight[i] >= 0 for i in linears)
    assert costs.notes == ("the step is not timed as a whole: the model does not fit on one device",)


class Full(nn.Module):
    """Has no memory for its second half while it is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def test_where_memory_ends_costs_are_computed_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEPART_CACHE", str(tmp_path))
    model, x = Full(), torch.randn(4, 8)
    recording = record(model, (x,))

    def full(given: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(model.second, "forward", full)
    costs = profiled(recording, [x], agree=bool)
    linears = [i for i, size in enumerate(costs.parameter_bytes) if size]
    assert len(linears) == 2
    assert all(costs.forward[i] > 0 for i in linears)
    (note,) = costs.notes
    assert note.startswith("the memory of the device is too small: the costs of")
    assert not list(tmp_path.glob("profiles/*"))


@pytest.mark.slow
def test_no_kernel_is_asked_for_a_half_that_crashes() -> None:
    """GroupNorm with channels-last strides ends the process when it is asked for gradients of weights alone."""
    done = subprocess.run([sys.executable, "-c", CHANNELS_LAST], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "measured" in done.stdout


def test_halves_are_measured_of_the_layers_that_run_in_halves() -> None:
    assert set(SPLIT_LAYERS) == set(deferred._FUNCTIONS)


@pytest.mark.slow
def test_a_model_that_sorts_its_experts_back_is_measured() -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, q_lora_rank=8,
        num_experts_per_tok=2, kv_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8,
        first_k_dense_replace=1, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 12))
    recording = record(DeepseekV3ForCausalLM(config), (), {"input_ids": ids, "labels": ids, "use_cache": False})
    leaves = recording.flatten((), {"input_ids": ids, "labels": ids, "use_cache": False})
    costs = profile(recording, leaves)
    assert not costs.notes
    assert sum(costs.backward) > 0


def test_a_measurement_leaves_the_model_as_it_was() -> None:
    model = Layers()
    model.register_buffer("table", torch.zeros(2))
    model.calls = 0
    model.head.bias.grad = torch.ones(4)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random_state = torch.get_rng_state()
    with state_kept(model):
        assert model.head.bias.grad is None
        model(torch.randn(8, 32), torch.zeros(8, dtype=torch.long)).backward()
        model.calls += 1
        model.table.data = torch.ones(5)
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(model.head.bias.grad, torch.ones(4))
    assert model.first[0].weight.grad is None
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
