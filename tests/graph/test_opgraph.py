"""The op graph of captured models: fields, edges, groups, FLOPs, networkx, and the public capture."""

import sys
from pathlib import Path

import networkx as nx
import pytest
import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipepart.errors import CaptureError
from pipepart.graph import capture, op_graph
from pipepart.recording import record, split
from pipepart.recording.model_state.state import preserved
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


def test_print_says_what_is_kept_and_fixed_and_why():
    class Choosy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.choice = Choice()

        def forward(self, x):
            return self.second(self.choice(self.first(x))).pow(2).mean()

    class Choice(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    text = str(capture(Choosy(), (torch.randn(3, 6),)))
    assert "note: kept 'choice' whole (DataDependent: Python reads the contents of a tensor" in text
    assert "note: dimension of size 6: fixed; the model fails at size" in text
    assert text.count("kept 'choice' whole") == 1


def test_eval_mode_takes_over_which_sizes_are_fixed(captured):
    assert captured.eval.sizes.keys() == captured.train.sizes.keys()
    assert [item.dynamic for item in captured.eval.inputs] == [item.dynamic for item in captured.train.inputs]
    result = capture(nn.Linear(6, 2), (torch.randn(3, 6),))
    (reason,) = {why for size, why in result.eval.sizes.values() if size is None}
    assert reason.startswith("fails at size")
    assert result.eval.inputs[0].dynamic == (True, False)


def test_capture_of_a_function_without_a_module_is_refused():
    with pytest.raises(CaptureError, match="bound method"):
        capture(torch.relu, (torch.randn(3),))


def test_flops_of_recurrent_layers_and_of_modules_kept_whole_are_counted():
    model, example = ARCHITECTURES["Mixture"]()
    graph = capture(model, example(2)).graph
    assert all(op.flops > 0 for op in graph.ops if op.module.startswith("experts") and op.parameters)
    layer = nn.LSTM(5, 7, batch_first=True)
    graph = capture(layer, (torch.randn(2, 3, 5),)).graph
    assert sum(op.flops for op in graph.ops) == 2 * 2 * 3 * 4 * 7 * (5 + 7)
