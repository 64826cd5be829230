"""The op graph of captured models: fields, edges, groups, FLOPs, networkx, and the public capture."""

import sys
from pathlib import Path

import networkx as nx
import pytest
import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipepart.capture import record, split
from pipepart.capture.state import preserved
from pipepart.errors import CaptureError
from pipepart.graph import capture, op_graph
from tools.bench.zoo.plain import ARCHITECTURES
from tools.bench.zoo.plain_blocks import GPT, ids


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    return capture(GPT(), (ids(2), ids(2)))


def test_ops_know_where_they_come_from(captured):
    graph = captured.graph
    qkv = graph.ops[graph.index("blocks_1_attention_qkv")]
    assert (qkv.kind, qkv.module, qkv.module_class) == ("module", "blocks.1.attention.qkv", "Linear")
    assert qkv.source.startswith("plain_blocks.py:")
    assert qkv.parameters == ("blocks.1.attention.qkv.weight", "blocks.1.attention.qkv.bias")
    assert qkv.shape == (2, 12, 96)
    assert qkv.output_bytes == 2 * 12 * 96 * 4
    assert qkv.parameter_bytes == (32 * 96 + 96) * 4
    head = graph.ops[graph.index("head")]
    assert head.parameters == ("tokens.weight",)
    assert graph.ops[0].kind == "input"
    assert graph.ops[-1].kind == "output"


def test_flops_are_those_of_the_matrix_products_and_of_attention(captured):
    tokens, width, depth, heads, length = 24, 32, 4, 4, 12
    linear = depth * 2 * tokens * 12 * width * width + 2 * tokens * width * 64
    attention = depth * 2 * 2 * (2 * heads) * length * length * (width // heads)
    assert sum(op.flops for op in captured.graph.ops) == linear + attention


def test_edges_run_forward_and_groups_are_in_range(captured):
    graph = captured.graph
    assert all(source < target for source, target in graph.edges)
    assert all(len(group) > 1 and max(group) < len(graph) for group in graph.colocated)
    network = graph.nx()
    assert isinstance(network, nx.DiGraph)
    assert nx.is_directed_acyclic_graph(network)
    assert network.nodes[graph.index("head")]["module_class"] == "Linear"
    assert network.number_of_edges() == len(set(graph.edges))


def test_masks_and_positions_are_replicable_and_weights_are_not(captured):
    replicable = {op.name for op in captured.graph.ops if op.replicable}
    assert "arange" in replicable
    assert not any(op.replicable for op in captured.graph.ops if op.parameters)


def test_cuts_are_repaired_to_valid_ones():
    model, example = ARCHITECTURES["UNet"]()
    recording = record(model, example(2))
    graph = op_graph(recording)
    for position in range(1, len(graph)):
        chunks = graph.chunks_at([position])
        for group in graph.colocated:
            assert len({chunks[graph.ops[i].name] for i in group}) == 1
        split(recording, chunks, 2)


@pytest.mark.parametrize("name", ["gpt_dropout", "UNet", "Modes", "Teacher", "Recurrent"])
def test_captured_module_follows_train_and_eval(name):
    model, example = ARCHITECTURES[name]()
    result = capture(model, example(3))
    assert model.training
    module = result.module
    args = example(4)
    for training in (True, False, True):
        (module.train if training else lambda: module.eval())()
        assert model.training is training
        with preserved(model):  # its buffers change with each call
            torch.manual_seed(7)
            wanted = model(*args)
        torch.manual_seed(7)
        torch.testing.assert_close(module(*args), wanted, rtol=1e-4, atol=1e-5)
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert list(module.state_dict()) == list(model.state_dict())


def test_capture_keeps_the_mode_of_each_submodule():
    model, example = ARCHITECTURES["Modes"]()
    model.norm.eval()
    capture(model, example(2))
    assert model.training
    assert not model.norm.training


def test_print_names_ops_modules_and_lines(captured):
    text = str(captured)
    assert "blocks.0.attention.qkv" in text
    assert "plain_blocks.py:" in text
    assert captured.hash[:12] in text


def test_capture_of_a_function_without_a_module_is_refused():
    with pytest.raises(CaptureError, match="bound method"):
        capture(torch.relu, (torch.randn(3),))


def test_counting_flops_does_not_touch_the_model():
    model, example = ARCHITECTURES["SharedModules"]()
    recording = record(model, example(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    op_graph(recording)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(isinstance(p, nn.Parameter) and not hasattr(p, "fake_mode") for p in model.parameters())
