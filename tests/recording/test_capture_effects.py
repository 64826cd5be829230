"""What a model does in Python beside its tensors: refused, kept by really calling the module, or said in a note."""

from collections import UserDict

import pytest
import torch
import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording import record

LOG, COUNT, TABLE = [], 0, {}


class Model(nn.Module):
    """`small` may be kept whole, `large` holds too many of the parameters for that."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
        self.numbers, self.named, self.state = [1, 2], {"calls": 0}, State()

    def forward(self, x):
        self.effect()
        return self.large(self.small(x)).sum()

    def effect(self):
        pass


class State:
    def __init__(self):
        self.calls = 0


class AppendsToGlobal(Model):
    def effect(self):
        LOG.append(1)


class CountsGlobally(Model):
    def effect(self):
        global COUNT
        COUNT += 1


class SetsItem(Model):
    def effect(self):
        self.named["calls"] += 1


class ChangesElement(Model):
    def effect(self):
        self.numbers[0] += 1


class ChangesObject(Model):
    def effect(self):
        self.state.calls += 1


class CountsInStaticMethod(Model):
    def effect(self):
        self.count()

    @staticmethod
    def count():
        global COUNT
        COUNT += 1


class CountsInProperty(Model):
    def effect(self):
        return self.count

    @property
    def count(self):
        global COUNT
        COUNT += 1
        return COUNT


class ChangesUserDict(Model):
    def __init__(self):
        super().__init__()
        self.user = UserDict(calls=0)

    def effect(self):
        self.user["calls"] += 1


def counts_in_closure():
    calls = 0

    class Counting(Model):
        def effect(self):
            nonlocal calls
            calls += 1

    return Counting()


def hooked(path):
    model, seen = Model(), []
    model.get_submodule(path).register_forward_hook(lambda module, args, out: seen.append(args[0].shape[0]))
    return model, seen


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (AppendsToGlobal, r"global 'LOG' of .*items before"),
        (CountsGlobally, "global 'COUNT'"),
        (SetsItem, "attribute 'named' of module ''"),
        (ChangesElement, "attribute 'numbers' of module ''"),
        (ChangesObject, "its 'calls'"),
        (CountsInStaticMethod, "global 'COUNT'"),
        (CountsInProperty, "global 'COUNT'"),
        (ChangesUserDict, "attribute 'user' of module ''"),
        (counts_in_closure, "variable 'calls' around"),
        (lambda: hooked("large")[0], r"variable 'seen' around(.|\n)*module 'large' holds"),
        (lambda: hooked("")[0], "variable 'seen' around"),
    ],
)
def test_lost_effects_are_refused_and_undone(build, words):
    model = build()
    with pytest.raises(CaptureError, match=words):
        record(model, (torch.randn(3, 4),))
    assert (LOG, COUNT, model.numbers, model.named, model.state.calls) == ([], 0, [1, 2], {"calls": 0}, 0)


@pytest.mark.parametrize(("path", "leaves"), [("small", ("small",)), ("small.0", ()), ("large.1", ())])
def test_effects_of_hooks_are_kept_where_the_module_is_one_op(path, leaves):
    model, seen = hooked(path)
    recording = record(model, (torch.randn(3, 4),))
    assert seen == []
    assert recording.leaves == leaves
    recording.module()(torch.randn(5, 4))
    assert seen == [5]


def test_a_table_that_the_first_call_fills_is_no_effect():
    class Tabulated(Model):
        def effect(self):
            TABLE.setdefault("scale", 2.0)

    record(Tabulated(), (torch.randn(3, 4),))
    assert TABLE == {"scale": 2.0}


def test_printing_is_noted(capsys):
    class Printing(Model):
        def effect(self):
            print("step")

    recording = record(Printing(), (torch.randn(3, 4),))
    assert any(note.startswith("the model prints at test_capture_effects.py:") for note in recording.notes)
    capsys.readouterr()
    recording.module()(torch.randn(3, 4))
    assert capsys.readouterr().out == ""


class _Momentum(nn.Module):
    """A second network that follows the first, updated inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.key.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters()):
                key.mul_(0.9).add_(query, alpha=0.1)
        return (self.query(x) * self.key(x)).sum()


def test_parameters_that_the_step_changes_are_named() -> None:
    with pytest.raises(CaptureError, match=r"changes parameters in place \(key.weight, key.bias\)"):
        record(_Momentum(), (torch.randn(2, 4),), {})
