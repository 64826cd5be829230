"""Functions that a program puts on a module in place of its methods, and that fill lists: equal to one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from realistic import Boring, build
from watching import QUIET

from pipepart import PipelineStrategy


def _wrapped(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append((function.__name__, tuple(args[0].shape), args[1:]))
        return result

    return call


def _partial(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def call(name: str, called: Callable[..., Any], *args: Any) -> Any:
        result = called(*args)
        calls.append({"name": name, "args": args})
        return result

    return functools.update_wrapper(functools.partial(call, function.__name__, function), function)


def _plain(calls: list[Any]) -> list[Any]:
    return [{**call, "args": [str(arg) for arg in call["args"]]} if isinstance(call, dict) else call for call in calls]


@pytest.mark.parametrize("put", [_wrapped, _partial])
def test_lists_that_they_fill(put: Callable[..., Any]) -> None:
    """Each batch is written down once, with its own values: recording leaves nothing behind."""
    _, data, _ = build("boring")
    found = []
    for strategy in ("auto", PipelineStrategy(stages=1)):
        torch.manual_seed(0)
        module, calls = Boring().double(), list[Any]()
        for name in ("forward", "training_step", "validation_step"):
            setattr(module, name, put(getattr(module, name), calls))
        limits = {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 0}
        L.Trainer(strategy=strategy, devices=1, max_epochs=1, **limits, **QUIET).fit(module, data, data)
        found.append(_plain(calls))
    assert len(found[0]) == 10
    assert found[1] == found[0]
