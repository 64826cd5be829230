"""Activation checkpointing inside a model is kept: memory as in the model, gradients and random numbers too."""

import gc

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from pipepart.graph import op_graph
from pipepart.recording import record, split
from tools.bench.zoo import language
from tools.bench.zoo.checks import compare, measure
from tools.bench.zoo.detached import run_detached

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, scale):
        return x + scale * self.down(self.drop(F.gelu(self.up(self.norm(x)))))


def nothing(block, x, scale):
    return block(x, scale)


def reentrant(block, x, scale):
    return checkpoint(block, x, scale, use_reentrant=True)


def non_reentrant(block, x, scale):
    return checkpoint(block, x, scale, use_reentrant=False, preserve_rng_state=True)


def nested(block, x, scale):
    return checkpoint(lambda v: non_reentrant(block, v, scale) * 0.9, x, use_reentrant=False)


def in_lower_precision(block, x, scale):
    def function(v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(v, scale).float()

    return checkpoint(function, x, use_reentrant=False)


class Net(nn.Module):
    def __init__(self, how, wrap=lambda block: block):
        super().__init__()
        self.how, self.first, self.head = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.scale, self.norm = nn.Parameter(torch.ones(WIDTH)), nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(wrap(Block()) for _ in range(4))

    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = self.how(block, x, self.scale)
        return F.cross_entropy(self.head(self.norm(x)), y)


def example(size=128):
    return torch.randn(size, WIDTH), torch.randint(0, 5, (size,))


def kept_bytes(call, args):
    """What is alive after a forward and was not before: the loss and all that is kept for its backward."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss = call(*args)
    found = sum(e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    assert loss is not None
    return found


def check(model, args, other):
    recording = record(model, args)
    module = recording.module()
    for values in (args, other):
        assert compare(measure(model, model, values), measure(model, module, values), "captured") == []
    assert recording.checkpoints
    return recording, module


@pytest.mark.parametrize(
    "how",
    [non_reentrant, *(pytest.param(way, marks=pytest.mark.slow) for way in (reentrant, nested, in_lower_precision))],
)
def test_memory_gradients_and_random_numbers_are_those_of_the_model(how):
    model = Net(how)
    recording, module = check(model, example(), example(96))
    args = example()
    eager, captured, flat = (kept_bytes(call, args) for call in (model, module, recording.graph_module()))
    assert captured <= 1.05 * eager
    assert flat > 2 * eager
    model.eval()  # chunks draw random numbers in another order
    graph = op_graph(recording)
    for cuts in ([len(graph) // 2], [graph.index("blocks_0_up"), graph.index("blocks_1_norm"), graph.index("norm")]):
        chunks = split(recording, graph.chunks_at(cuts), len(cuts) + 1)

        def run(*values, chunks=chunks):
            return run_detached(recording, chunks, recording.flatten(values))[0].detach()

        assert compare(measure(model, model, args), measure(model, run, args), "cut") == []


def test_hash_tells_checkpointed_regions():
    assert record(Net(non_reentrant), example()).hash != record(Net(nothing), example()).hash


def test_checkpoint_wrapper_of_torch():
    model = Net(nothing, checkpoint_wrapper)
    recording, _ = check(model, example(), example(96))
    assert len(recording.checkpoints) == len(model.blocks)


def test_reentrant_checkpointing_of_inputs_without_gradient_gives_none():
    class First(Net):
        def forward(self, x, y):
            return F.cross_entropy(self.head(checkpoint(self.first, x, use_reentrant=True)), y)

    model = First(nothing)
    args = example()
    wanted, got = measure(model, model, args), measure(model, record(model, args).module(), args)
    assert compare(wanted, got, "captured") == []
    assert "first.weight" not in got[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_gradient_checkpointing_of_transformers(name):
    pytest.importorskip("transformers")
    model, batch = language.ARCHITECTURES[name]()
    model.model.gradient_checkpointing_enable()
    model.train()
    _, module = check(model, batch(4), batch(3))
    args = batch(4)
    assert kept_bytes(module, args) <= 1.1 * kept_bytes(model, args)
