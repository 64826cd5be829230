"""Plain Python values that a recording was made with: what counts as read, what a change means, numbers as inputs."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from pipepart.recording import record

FACTOR = 2.0
TABLE: dict[str, Any] = {"shift": 0.5, "names": ["a"]}


def helper(x):
    return x * FACTOR


class Config:
    """Of many values, a few are read."""

    def __init__(self) -> None:
        self.scale, self.unread = 3.0, 1
        self.many = {f"key{i}": i for i in range(300)}

    @property
    def doubled(self) -> float:
        return self.scale * 2


class Inner(nn.Module):
    gain = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flag, self.dropout = nn.Linear(4, 4), True, nn.Dropout(0.0)

    def forward(self, x):
        x = self.dropout(self.linear(x))
        return x * self.gain if self.flag else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.beta, self.unread = Inner(), 0.25, 1.0
        self.config, self.space = Config(), types.SimpleNamespace(gamma=1.0)
        self.double()

    def forward(self, x):
        if hasattr(self, "extra"):
            x = x + 1
        y = helper(self.inner(x)) + TABLE["shift"] + self.space.gamma
        return (y * self.beta * self.config.doubled).sum()


X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


def _set_global(value: float) -> None:
    global FACTOR
    FACTOR = value


CHANGES: dict[str, tuple[Any, str]] = {
    "attribute": (lambda m: setattr(m, "beta", 0.5), "self.beta (was 0.25, is 0.5)"),
    "flag of a submodule": (lambda m: setattr(m.inner, "flag", False), "self.inner.flag (was True, is False)"),
    "object": (lambda m: setattr(m.config, "scale", 4.0), "self.config.scale (was 3.0, is 4.0)"),
    "another object": (lambda m: setattr(m, "space", types.SimpleNamespace(gamma=2.0)), "self.space.gamma (was 1.0"),
    "class": (lambda m: setattr(type(m.inner), "gain", 1.0), "Inner.gain (was 1.5, is 1.0)"),
    "over a class attribute": (lambda m: setattr(m.inner, "gain", 1.0), "self.inner.gain itself (was nothing, is 1.0)"),
    "global": (lambda m: _set_global(3.0), "global 'FACTOR' of test_capture_state (was 2.0, is 3.0)"),
    "item of a global": (lambda m: TABLE.update(shift=1.0), "['shift'] (was 0.5, is 1.0)"),
    "new attribute": (lambda m: setattr(m, "extra", 1), "self.extra (was nothing, is 1)"),
    "another buffer": (lambda m: m.inner.register_buffer("gamma", torch.ones(1)), ""),
    "unread attribute": (lambda m: setattr(m, "unread", 2.0), ""),
    "unread item": (lambda m: setattr(m.config, "unread", 2.0), ""),
    "whether a module draws": (lambda m: setattr(m.inner.dropout, "p", 0.5), "self.inner.dropout.p (was 0.0, is 0.5)"),
    "number of a module that is one op": (lambda m: setattr(m.inner.linear, "in_features", 5), ""),
}


@pytest.fixture(autouse=True)
def _same_state():
    yield
    _set_global(2.0)
    TABLE["shift"] = 0.5
    Inner.gain = 1.5


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_what_was_read_are_named(name: str) -> None:
    change, words = CHANGES[name]
    model = Model()
    recording = record(model, (X,))
    assert recording.guards.changes() == []
    change(model)
    found = [str(item) for item in recording.guards.changes()]
    assert (words in found[0]) if words else not found, found


def test_numbers_as_inputs_follow_their_places() -> None:
    model = Model()
    first = record(model, (X,))
    model.beta, model.config.scale, model.space.gamma, TABLE["shift"] = 0.5, 4.0, 2.0, 1.0
    _set_global(3.0)
    numbers = [change.place for change in first.guards.changes() if change.is_number]
    assert len(numbers) == 5
    recording = record(model, (X,), numbers=numbers)
    replayed = recording.module()
    for value in (0.1, 0.9):
        model.beta, model.config.scale, TABLE["shift"] = value, value + 1, value / 2
        model.space = types.SimpleNamespace(gamma=value - 3)
        _set_global(value * 2)
        assert recording.guards.changes() == []
        torch.testing.assert_close(replayed(X[:3]), model(X[:3]), rtol=1e-12, atol=0)
    assert (model.beta, FACTOR) == (0.9, 1.8), "recording leaves the state as it was"


def test_the_rate_of_dropout_may_change() -> None:
    """A module that is one op is really called: its numbers are what they are at that time."""
    model = Model()
    first = record(model, (X,))
    model.inner.dropout.p = 0.5
    (change,) = first.guards.changes()
    replayed = record(model, (X,), numbers=[change.place]).module()
    for rate in (0.25, 0.75):
        model.inner.dropout.p = rate
        torch.manual_seed(0)
        expected = model(X)
        torch.manual_seed(0)
        torch.testing.assert_close(replayed(X), expected, rtol=1e-12, atol=0)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.level, self.width = nn.Linear(4, 4), 0.5, 2

    def forward(self, x):
        y = self.linear(x[:, : self.width].repeat(1, 4 // self.width))
        return (y * self.level).sum() if self.level < 1 else y.sum()


def test_decisions_and_sizes_stay_fixed() -> None:
    """A number that is an input is checked where Python decides by it, and where it may be a size."""
    model = Deciding()
    first = record(model, (X.float(),))
    model.level, model.width = 0.75, 4
    numbers = [change.place for change in first.guards.changes() if change.is_number]
    recording = record(model, (X.float(),), numbers=numbers)

    def stale() -> str | None:
        return recording.stale(recording.flatten((X.float(),)))

    assert stale() is None
    model.level = 0.9
    assert stale() is None
    model.level = 1.5
    assert "lt" in str(stale())
    model.level, model.width = 0.9, 2
    assert "eq" in str(stale())
