"""The second forward of a chunk draws what the first one drew, wherever it draws from."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from pipepart.runtime.randomness import RandomState, recomputing, running_again


def _draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_every_generator_is_wound_back_and_forward_again() -> None:
    device = torch.device("cpu")
    before = RandomState(device)
    first = _draw()
    between = RandomState(device)
    following = _draw()
    between.restore()
    assert not running_again()
    with recomputing(nn.BatchNorm1d(2), before, device):
        assert running_again()
        assert _draw() == first
    assert not running_again()
    assert _draw() == following


def test_buffers_do_not_count_the_second_run() -> None:
    layer = nn.BatchNorm1d(2)
    device = torch.device("cpu")
    state = RandomState(device)
    layer(torch.randn(4, 2))
    kept = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with recomputing(layer, state, device):
        layer(torch.randn(4, 2))
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, kept[name]), name
