"""Random cuts with really detached boundaries: loss, gradients and buffers as in one process, at two batch sizes."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipepart.graph import op_graph
from pipepart.recording import record, split
from pipepart.recording.op import op_of
from pipepart.recording.proof.chunk_proof import prove_chunks
from tools.bench.zoo.checks import compare, measure
from tools.bench.zoo.detached import non_differentiable_bytes, run_detached
from tools.bench.zoo.plain import ARCHITECTURES

QUICK = ("gpt", "UNet", "InPlace")
VARIED = [
    "gpt",
    "UNet",
    "ResNet",
    "Recurrent",
    "PackedRecurrent",
    "Mixture",
    "EncoderDecoder",
    "TiedEncoder",
    "Dense",
    "Video",
    "Rotary",
    "Routing",
    "Teacher",
    "InPlace",
    "SharedModules",
    "Hooks",
    "Autocast",
    "Frozen",
    "StraightThrough",
    "Caching",
]


@functools.cache
def prepared(name):
    """Model, recording, op graph, and what one process gives for two batch sizes."""
    torch.manual_seed(0)
    model, example = ARCHITECTURES[name]()
    model.train()
    recording = record(model, example(2))
    if any(op_of(node).random for node in recording.ops if node.op != "output"):
        model.eval()  # another order of chunks draws other random numbers
        recording = record(model, example(2))
    wanted = [(args, measure(model, model, args)) for args in (example(2), example(3))]
    return model, recording, op_graph(recording), wanted


def check_cuts(name, count, places):
    model, recording, graph, wanted = prepared(name)
    positions = [min(int(place * count), count - 1) for place in places]
    wish = [positions[i * len(positions) // len(graph)] for i in range(len(graph))]
    chunks = split(recording, graph.repaired(wish), count)

    def run(*args):
        return run_detached(recording, chunks, recording.flatten(args))[recording.loss_index].detach()

    for args, reference in wanted:
        assert compare(reference, measure(model, run, args), "cut") == []
    assert {name for chunk in chunks for name in chunk.parameters} <= {name for name, _ in model.named_parameters()}


# Chunks wished for along the program: mostly forward, sometimes back, so that repairing and skips are exercised.
cut_sets = st.integers(2, 8).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=24).flatmap(
            lambda values: st.sampled_from([sorted(values), values])
        ),
    )
)


@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(cuts=cut_sets)
def test_cuts_equal_one_process(name, cuts):
    check_cuts(name, *cuts)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIED)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(cuts=cut_sets)
def test_many_cuts_equal_one_process(name, cuts):
    check_cuts(name, *cuts)


@pytest.mark.parametrize("name", ["gpt", "Rotary", "Dictionaries"])
def test_masks_positions_and_sizes_do_not_travel(name):
    _, recording, graph, _ = prepared(name)
    size = len(graph)
    chunks = split(recording, graph.chunks_at([size * i // 4 for i in range(1, 4)]), 4)
    assert non_differentiable_bytes(chunks) == 0
    assert all(edge.kind == "tensor" for chunk in chunks for edge in chunk.imports)


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)])
def test_a_result_that_is_a_view_and_is_changed_in_place_sends_gradients_back(norm):
    """InstanceNorm gives a view of a tensor that no op shows; an activation in place then hangs on that tensor."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.LeakyReLU(inplace=True), nn.Conv2d(4, 2, 3)).double()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return self.layers(x).pow(2).mean()

    example = (torch.randn(2, 3, 8, 8, dtype=torch.float64),)
    recording = record(Model().train(), example)
    graph = op_graph(recording)
    chunk_of = graph.chunks_at([2])
    chunks = split(recording, chunk_of, 2)
    (edge,) = chunks[0].exports
    assert edge.grad_targets == (1,)
    prove_chunks(recording, chunks, chunk_of, recording.flatten(example))
