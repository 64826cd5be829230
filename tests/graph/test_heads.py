"""Heads are found in the forms in which models write them, and stay whole, with the reason, where something else reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.heads import CLASSES, FORMS, WIDTH, Form, Model, batch

from pipepart.graph import op_graph
from pipepart.graph.heads import find_heads
from pipepart.recording import record


@pytest.mark.parametrize("name", FORMS)
def test_a_head_is_found(name: str) -> None:
    recording = record(Model(FORMS[name]), batch())
    found = find_heads(recording)
    assert found.reasons == ()
    (head,) = found.heads
    assert (head.classes, head.features) == (CLASSES, WIDTH)
    graph = op_graph(recording)
    (ops,) = graph.heads
    assert [graph.ops[op].name for op in ops.ops] == [node.name for node in head.ops]


def _accuracy(m: Any, h: torch.Tensor, y: torch.Tensor) -> Any:
    scores = m.head(h)
    return F.cross_entropy(scores.flatten(0, 1), y.flatten()), (scores.argmax(-1) == y).double().mean()


def _output(m: Any, h: torch.Tensor, y: torch.Tensor) -> Any:
    scores = m.head(h)
    return F.cross_entropy(scores.flatten(0, 1), y.flatten()), scores


def _capped(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.tanh(m.head(h)).flatten(0, 1), y.flatten())


def _padding(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.head(h)[..., :-1].flatten(0, 1), y.flatten().clamp(max=CLASSES - 2))


def _soft(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.head(h).flatten(0, 1), F.one_hot(y.flatten().clamp(min=0), CLASSES).double())


def _each(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.head(h).flatten(0, 1), y.flatten(), reduction="none").square().mean()


def _scaled(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, m.head.weight * 0.5).flatten(0, 1), y.flatten())


def _no_head(m: Any, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return m.head(h).square().mean() + 0.0 * y.double().sum()


WHOLE: dict[str, tuple[Form, str]] = {
    "accuracy": (_accuracy, "its scores are also read by 'argmax'"),
    "output": (_output, "its scores are an output of the step"),
    "capped": (_capped, "its scores go through 'tanh'"),
    "padding": (_padding, "takes some of the classes"),
    "soft targets": (_soft, "its targets are probabilities"),
    "no reduction": (_each, "it is not a mean or a sum"),
    "computed weight": (_scaled, "the weight of its linear layer is computed"),
    "no loss": (_no_head, "no cross-entropy of torch"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_head_that_must_stay_whole(name: str) -> None:
    form, reason = WHOLE[name]
    found = find_heads(record(Model(form), batch()))
    assert not found.heads
    assert len(found.reasons) == 1
    assert reason in found.reasons[0]
