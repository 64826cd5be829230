"""A part of the zoo of library models: captured equal to eager, and nothing but activations crosses the cuts."""

import pytest
import torch

from pipepart.errors import CaptureError
from pipepart.graph import op_graph
from pipepart.recording import record, split
from tools.bench.zoo import images, language
from tools.bench.zoo.checks import check_model
from tools.bench.zoo.detached import non_differentiable_bytes

QUICK = ["gpt2", "llama", "vit"]
SLOW = [
    "bert",
    "t5",
    "swin",
    "mixtral",
    "bloom",
    "bart",
    "deberta_v2",
    "whisper",
    "clip",
    "mamba",
    "gemma2",
    "longformer",
    "xlnet",
    "convnext",
    "wav2vec2_all_layers",
]
TIMM = ["resnet18", "mobilenetv3_small_050", "convnext_atto", "levit_128s"]


def test_the_zoo_is_large_enough():
    assert len(language.ARCHITECTURES) >= 45
    assert len(images.ARCHITECTURES) >= 60


def check(report):
    assert report.equal, report.problems
    assert report.largest_op <= max(0.4, report.largest_leaf + 1e-9)


@pytest.mark.parametrize("name", QUICK)
def test_transformers(name):
    pytest.importorskip("transformers")
    check(check_model(name, *language.ARCHITECTURES[name]()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_transformers(name):
    pytest.importorskip("transformers")
    check(check_model(name, *language.ARCHITECTURES[name]()))


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    images.stub_torchvision()
    pytest.importorskip("timm")
    check(check_model(name, *images.ARCHITECTURES[name]()))


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "bloom", "t5"))]
)
def test_only_activations_cross_even_cuts(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, example = language.ARCHITECTURES[name]()
    recording = record(model.train(), example(2))
    graph = op_graph(recording)
    chunks = split(recording, graph.chunks_at([len(graph) * i // 4 for i in range(1, 4)]), 4)
    assert non_differentiable_bytes(chunks) == 0


@pytest.mark.slow
def test_layers_that_are_dropped_at_random_are_refused_with_what_to_set():
    pytest.importorskip("transformers")
    model, example = language.ARCHITECTURES["wav2vec2_ctc"]()
    with pytest.raises(
        CaptureError, match=r"modeling_wav2vec2\.py:\d+(.|\n)*LayerDrop of a library: set its rate to 0"
    ):
        record(model.train(), example(2))
