"""What a recording promises: state untouched, stable hash, clear errors, meta device, chunks that share parameters."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from pipepart.errors import CaptureError
from pipepart.graph import op_graph
from pipepart.recording import BATCH, GuardError, record, split
from tools.bench.zoo.detached import run_detached
from tools.bench.zoo.plain import ARCHITECTURES
from tools.bench.zoo.plain_blocks import GPT, ids

ROOT = Path(__file__).resolve().parents[2]


def gpt(batch=2):
    torch.manual_seed(0)
    return GPT(), (ids(batch), ids(batch))


def test_recording_leaves_the_model_as_it_was():
    model, example = ARCHITECTURES["Modes"]()
    args = example(3)
    model(*args).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    rng = torch.get_rng_state()
    record(model, args)
    assert torch.equal(rng, torch.get_rng_state())
    assert model.training
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads))
    assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}


@pytest.mark.slow
def test_another_process_the_same_hash_on_the_meta_device_and_ten_billion_parameters_without_memory():
    model, args = gpt()
    here = record(model, args).hash
    code = (
        "import torch; from tools.bench.zoo.plain_blocks import GPT, ids; from pipepart.recording import record\n"
        "torch.manual_seed(1)\nwith torch.device('meta'): m = GPT()\nprint(record(m, (ids(4), ids(4))).hash)\n"
        "from tools.bench.zoo.large import capture_large\nfound = capture_large(10.0)\n"
        "print(found.parameters, found.peak_bytes)"
    )
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    hashed, numbers = there.stdout.strip().splitlines()[-2:]
    assert hashed == here
    parameters, peak = map(int, numbers.split())
    assert parameters > 10e9
    assert peak < 1e9
    other = GPT(depth=3)
    assert record(other, args).hash != here


@pytest.mark.slow
def test_meta_model_is_recorded_and_runs_when_its_part_is_materialised():
    with torch.device("meta"):
        model = GPT()
    args = (ids(2), ids(2))
    recording = record(model, args)
    graph = op_graph(recording)
    chunks = split(recording, graph.chunks_at([len(graph) // 2]), 2)
    assert all(p.is_meta for p in model.parameters())
    assert set(chunks[0].parameters) & set(chunks[1].parameters) == {"tokens.weight"}
    for name in chunks[0].parameters:  # only what the first chunk needs
        owner, _, leaf = name.rpartition(".")
        real = nn.Parameter(torch.randn(model.get_parameter(name).shape) * 0.02)
        setattr(model.get_submodule(owner), leaf, real)
    values = dict(zip(("idx", "target"), args))
    out = chunks[0].module(*(values[edge.name] for edge in chunks[0].imports))
    assert [tuple(value.shape) for value in out] == [edge.shape for edge in chunks[0].exports]
    assert not any(value.is_meta for value in out)
    assert model.get_parameter(chunks[1].parameters[-1]).is_meta


def test_chunks_share_parameters_names_and_modes():
    model, args = gpt()
    recording = record(model, args)
    graph = op_graph(recording)
    chunks = split(recording, graph.chunks_at([30, 60, 90]), 4)
    names = dict(model.named_parameters())
    for chunk in chunks:
        assert all(names[name] is value for name, value in chunk.module.named_parameters())
        assert [name for name, _ in chunk.module.named_parameters()] == list(chunk.parameters)
    assert set().union(*(chunk.parameters for chunk in chunks)) == set(names)
    assert "tokens.weight" in chunks[0].parameters
    assert "tokens.weight" in chunks[-1].parameters
    for chunk in chunks:
        for edge in chunk.imports:
            assert edge.source == BATCH or edge.source < chunk.index
            assert chunk.index in edge.targets
            assert set(edge.grad_targets) <= set(edge.targets)
    assert chunks[-1].exports == ()


def test_flatten_says_which_leaf_is_wrong():
    model, args = gpt()
    recording = record(model, args)
    assert recording.flatten(args) == list(args)
    with pytest.raises(CaptureError, match="another structure"):
        recording.flatten((args,))
    with pytest.raises(CaptureError, match=r"argument target .*int64.*float32"):
        recording.flatten((args[0], args[1].float()))
    with pytest.raises(GuardError, match="were equal when it was recorded"):
        recording.flatten((ids(2, 8), ids(2, 9)))
    recording.module()(ids(1, 5), ids(1, 5))
    with pytest.raises(GuardError, match=r"le in module '' at plain_blocks\.py:\d+"):
        recording.module()(ids(2, 17), ids(2, 17))


def test_constants_are_checked():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, scale, *, mode="sum"):
            y = self.linear(x) * scale
            return y.sum() if mode == "sum" else y.mean()

    recording = record(Scaled(), (torch.randn(3, 4), 2.0), {"mode": "mean"})
    x = torch.randn(5, 4)
    assert [spec.kind for spec in recording.inputs] == ["tensor", "constant", "constant"]
    recording.module()(x, 2.0, mode="mean")
    with pytest.raises(GuardError, match=r"argument scale .*2.0 only, got 3.0"):
        recording.module()(x, 3.0, mode="mean")
    with pytest.raises(GuardError, match="argument mode"):
        recording.module()(x, 2.0, mode="sum")


def test_fixed_dimensions_are_refused_and_free_ones_are_not():
    model, example = ARCHITECTURES["UNet"]()
    recording = record(model, example(2))
    assert recording.inputs[0].dynamic == (True, False, True, True)
    wide = torch.randn(2, 3, 16, 48)
    torch.testing.assert_close(recording.module()(wide), model(wide), rtol=1e-4, atol=1e-5)
    with pytest.raises(GuardError, match="dimension 1 was 3"):
        recording.flatten((torch.randn(2, 4, 32, 32),))


def test_split_refuses_what_is_wrong_by_name():
    model, args = gpt()
    recording = record(model, args)
    graph = op_graph(recording)
    good = graph.chunks_at([50])
    with pytest.raises(CaptureError, match="goes back from chunk 1 to chunk 0"):
        split(recording, {**good, "tokens": 1}, 2)
    with pytest.raises(CaptureError, match="must be in one chunk"):
        split(recording, {**dict.fromkeys(good, 0), **{op.name: 1 for op in graph.ops[graph.index("split") + 1 :]}}, 2)
    with pytest.raises(CaptureError, match="expected 0 to 1"):
        split(recording, {**good, "tokens": 5}, 2)
    missing = dict(good)
    del missing["tokens"]
    with pytest.raises(CaptureError, match=r"'tokens' .*has no chunk"):
        split(recording, missing, 2)


def test_more_chunks_than_work_gives_empty_ones():
    model, args = gpt()
    recording = record(model, args)
    chunks = split(recording, [2] * len(recording.ops), 5)
    wanted = model(*args)
    wanted.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    out = run_detached(recording, chunks, recording.flatten(args))
    torch.testing.assert_close(out[0], wanted)
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
    assert chunks[0].imports == chunks[0].exports == ()


def test_gradients_go_only_where_they_are_needed():
    model, example = ARCHITECTURES["Frozen"]()
    recording = record(model, example(2))
    graph = op_graph(recording)
    chunks = split(recording, graph.chunks_at([graph.index("layers_2"), graph.index("layers_5")]), 3)
    assert [edge.grad_targets for edge in chunks[0].exports] == [()]
    assert [edge.grad_targets for edge in chunks[1].exports] == [(2,)]


def test_bound_methods_and_functions():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def encode(self, x):
            return self.a(x).relu()

        def forward(self, x):
            return self.b(self.encode(x))

    model, x = Pair(), torch.randn(3, 4)
    torch.testing.assert_close(record(model.encode, (x,)).module()(x), model.encode(x))
    recording = record(lambda x, y: F.mse_loss(model(x), y), (x, torch.randn(3, 1)), root=model)
    assert recording.loss_index == 0
    with pytest.raises(CaptureError, match="root="):
        record(lambda x: model(x), (x,))


def test_the_users_own_error_is_the_users():
    model, _ = gpt()
    with pytest.raises(AssertionError, match="too long"):
        record(model, (ids(2, 17), ids(2, 17)))


def test_what_is_too_large_to_keep_whole_is_refused_with_module_and_line():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.from_numpy(x.detach().numpy() * 2).sum() + self.linear(x).sum()

    with pytest.raises(CaptureError, match=r"cannot be recorded(.|\n)*test_capture_contract\.py:\d+"):
        record(Large(), (torch.randn(3, 4),))


def test_layer_drop_is_refused():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                if torch.rand([]) > 0.5:
                    x = layer(x)
            return x.sum()

    with pytest.raises(CaptureError, match="random number"):
        record(Dropping(), (torch.randn(3, 4),))


def test_data_dependent_branch_at_the_top_is_guarded():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return (self.a(x) if x.sum() > 0 else self.b(x)).pow(2).mean()

    model, x = Branch(), torch.rand(3, 4)
    module = record(model, (x,)).module()
    torch.testing.assert_close(module(x + 1), model(x + 1))
    with pytest.raises(GuardError, match=r"was True when the model was recorded, is False"):
        module(-x)


def test_devices_of_chunks():
    model, args = gpt()
    recording = record(model, args)
    chunks = split(recording, [0] * len(recording.ops), 1, devices=[torch.device("meta")])
    assert "device(type='meta')" in chunks[0].module.code


def test_state_that_a_call_replaces_is_kept_from_call_to_call():
    model, example = ARCHITECTURES["Reassigned"]()
    twin = copy.deepcopy(model)
    recording = record(model, example(3))
    graph = op_graph(recording)
    chunks = split(recording, graph.chunks_at([len(graph) // 2]), 2)
    for size in (3, 5, 2):
        args = example(size)
        wanted = twin(*args)
        torch.testing.assert_close(run_detached(recording, chunks, recording.flatten(args))[0], wanted)
        torch.testing.assert_close(model.mean, twin.mean)
        torch.testing.assert_close(model.memory, twin.memory)
    assert list(model.state_dict()) == list(twin.state_dict())


def test_stale_tells_before_anything_runs():
    model, args = gpt()
    recording = record(model, args)
    assert recording.stale(recording.flatten((ids(5, 16), ids(5, 16)))) is None
    assert "le in module ''" in recording.stale(recording.flatten((ids(2, 17), ids(2, 17))))


def test_distributed_and_lazy_modules_are_refused_by_name():
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match="is lazy"):
        record(nn.Sequential(nn.LazyLinear(4)), (x,))
    with pytest.raises(CaptureError, match="capture the module inside"):
        record(nn.DataParallel(nn.Linear(4, 4)), (x,))


def test_notes_say_what_is_kept_and_what_is_not():
    model, example = ARCHITECTURES["Checkpointed"]()
    assert any("checkpointing inside the model is kept" in note for note in record(model, example(2)).notes)

    class Cache:
        def __init__(self, value):
            self.layers = [{"key": value}]

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x):
            y = self.linear(x)
            return {"loss": y.pow(2).mean(), "cache": Cache(y)}

    recording = record(Caching(), (torch.randn(3, 4),))
    assert any("Cache" in note for note in recording.notes)
    assert recording.module()(torch.randn(3, 4))["cache"] is None


def test_what_is_done_for_one_sample_only_is_recorded_with_one():
    class Expanding(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            places = torch.arange(x.shape[1])[None]
            if x.shape[0] != places.shape[0]:
                places = places.expand(x.shape[0], -1) * 2
            return (self.linear(x) * places[..., None]).mean()

    model, one = Expanding(), torch.randn(1, 6, 4)
    recording = record(model, (one,))
    assert any("holds for one sample only" in note for note in recording.notes)
    for x in (one, torch.randn(1, 9, 4)):
        assert torch.equal(recording.module()(x), model(x))
    with pytest.raises(GuardError, match="dimension 0 was 1"):
        recording.module()(torch.randn(3, 6, 4))
    several = record(model, (torch.randn(2, 6, 4),))
    assert torch.equal(several.module()(one.repeat(3, 1, 1)), model(one.repeat(3, 1, 1)))
    assert several.stale([one]) is not None


def test_batch_is_found_among_inputs_of_other_sizes():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, mask, x, y):
            return F.mse_loss(mask @ self.linear(x), y)

    model = Masked()
    recording = record(model, (torch.rand(6, 6), torch.randn(3, 6, 4), torch.randn(3, 6, 4)))
    args = (torch.rand(5, 5), torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    torch.testing.assert_close(recording.module()(*args), model(*args))
    with pytest.raises(GuardError, match="were equal"):
        recording.flatten((torch.rand(5, 5), torch.randn(2, 6, 4), torch.randn(2, 6, 4)))


def test_a_model_that_sets_itself_up_in_its_first_call_is_recorded_as_set_up():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.ready, self.calls = nn.Linear(4, 4), False, 0

        def forward(self, x):
            y = self.linear(x) if self.ready else self.linear(x) * 0
            self.ready = True
            return y.sum()

    class Counting(Lazy):
        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    model, x = Lazy(), torch.randn(3, 4)
    torch.testing.assert_close(record(model, (x,)).module()(x), model.linear(x).sum())
    counting = Counting()
    with pytest.raises(CaptureError, match="'calls' of module '' is changed"):
        record(counting, (x,))
    assert (counting.calls, counting.ready) == (0, False)
