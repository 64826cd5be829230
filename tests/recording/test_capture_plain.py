"""Every hand-written model, captured, equals the original: loss, gradients, buffers, other batch size, eval, names."""

import pytest
import torch

from pipepart.recording import record
from pipepart.recording.op import op_of
from tools.bench.zoo.checks import check_model
from tools.bench.zoo.plain import ARCHITECTURES


def test_there_are_at_least_thirty_of_them():
    assert len(ARCHITECTURES) >= 30


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_to_eager(name):
    model, example = ARCHITECTURES[name]()
    report = check_model(name, model, example)
    assert report.captured, report.problems
    assert report.equal, report.problems
    assert report.largest_op <= max(0.4, report.largest_leaf + 1e-9)


@pytest.mark.parametrize("name", ["gpt", "UNet", "PythonNumbers", "Recurrent", "Modes", "Video"])
def test_example_of_one_sample_does_not_bake_in_the_batch_size(name):
    model, example = ARCHITECTURES[name]()
    model.eval()
    recording = record(model, example(1))
    for batch in (1, 2, 5):
        args = example(batch)
        torch.testing.assert_close(recording.module()(*args), model(*args))
    assert op_of(recording.ops[0]).shape[0] == 1


@pytest.mark.parametrize("name", ["gpt_dropout", "UNet", "Dictionaries", "TiedEncoder"])
def test_a_recording_follows_train_and_eval_of_the_model(name):
    model, example = ARCHITECTURES[name]()
    model.train()
    recording = record(model, example(3))
    module, args = recording.module(), example(3)
    model.eval()
    torch.testing.assert_close(module(*args), model(*args))
    torch.testing.assert_close(module(*args), module(*args), rtol=0, atol=0)
    model.train()
    torch.manual_seed(5)
    wanted = model(*args)
    torch.manual_seed(5)
    torch.testing.assert_close(module(*args), wanted)
