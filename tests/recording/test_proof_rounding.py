"""Gradients that cancel to rounding errors are no difference, in whatever order they are summed; wrong ones still are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn as nn
from support.mixers import MIXERS

from pipepart.errors import CaptureError
from pipepart.graph import op_graph
from pipepart.recording import prove_chunks, record, split
from pipepart.recording.proof.differences import Difference, beyond_rounding
from pipepart.recording.proof.outcome import Outcome


def _cut(seed: int, size: int):
    """MMD looks at distances: the gradient of the last bias cancels to nothing, that of no other parameter does."""
    torch.manual_seed(seed)
    model = MIXERS["mmd"]().double()
    args = tuple(t.double() for t in model.batch(size))
    recording = record(model, args)
    graph = op_graph(recording)
    chunk_of = graph.repaired([3 * i // len(graph.ops) for i in range(len(graph.ops))])
    return recording, chunk_of, split(recording, chunk_of, 3), recording.flatten(args)


@pytest.mark.parametrize("seed", range(6))
def test_gradients_that_cancel_are_proved(seed):
    recording, chunk_of, chunks, leaves = _cut(seed, 2 if seed % 2 else 8)
    before = {name: p.detach().clone() for name, p in recording.root.named_parameters()}
    versions = {name: p._version for name, p in recording.root.named_parameters()}
    prove_chunks(recording, chunks, chunk_of, leaves)
    for name, parameter in recording.root.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter._version == versions[name]


def test_a_lost_gradient_is_found_beside_gradients_that_cancel():
    recording, chunk_of, chunks, leaves = _cut(0, 8)
    lost = next(edge.name for chunk in chunks for edge in chunk.exports if edge.grad_targets)

    def cut(edges):
        return tuple(dataclasses.replace(e, grad_targets=()) if e.name == lost else e for e in edges)

    broken = [dataclasses.replace(c, imports=cut(c.imports), exports=cut(c.exports)) for c in chunks]
    with pytest.raises(CaptureError, match=lost):
        prove_chunks(recording, broken, chunk_of, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_gradients_are_not_rounding_errors(dtype):
    """Gradients that vanish on the way down are small, and right in most of their digits."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)), nn.Linear(6, 1)).to(dtype)
    with torch.no_grad():
        for parameter in model[1:].parameters():
            parameter.mul_(0.05)
    x = torch.randn(4, 6, dtype=dtype)

    def run() -> Outcome:
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(model(x).sum(), list(parameters.values()))
        return Outcome([], {}, dict(zip(parameters, found)))

    wanted = run()
    size = float(wanted.gradients["0.weight"].abs().max())
    assert size < 1e-9 * float(wanted.gradients["8.weight"].abs().max())
    wrong = Difference("gradient of", "0.weight", "differs", 1e-3, 1e-3 * size)
    assert beyond_rounding([wrong], wanted, model, run) == [wrong]
