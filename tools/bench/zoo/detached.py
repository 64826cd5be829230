"""Run chunks one after the other in one process with really detached boundaries: what a pipeline does, without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipepart.recording import Chunk, Recording

__all__ = ["non_differentiable_bytes", "run_detached"]


def run_detached(recording: Recording, chunks: Sequence[Chunk], leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Forward through all chunks, then backward chunk by chunk from the loss; gradients land in the parameters.

    Every value that crosses is a copy without history, and only the edges that say so send a gradient back.
    """
    names = [node.name for node in recording.graph.nodes if node.op == "placeholder"]
    values: dict[str, Any] = dict(zip(names, leaves))
    tape = []
    for chunk in chunks:
        taken = []
        for edge in chunk.imports:
            value = values[edge.name]
            if isinstance(value, torch.Tensor):
                value = value.detach().clone()
                value.requires_grad_(chunk.index in edge.grad_targets)
            taken.append(value)
        given = chunk.module(*taken)
        tape.append((chunk, taken, given))
        values.update((edge.name, value) for edge, value in zip(chunk.exports, given))
    outputs = tape[-1][2]
    if recording.loss_index is not None:
        _backward(tape, outputs[recording.loss_index])
    return outputs


def _backward(tape: list[Any], loss: torch.Tensor) -> None:
    grads: dict[str, torch.Tensor] = {}
    for chunk, taken, given in reversed(tape):
        if chunk is tape[-1][0]:
            if loss.requires_grad:
                loss.backward()
        else:
            pairs = [(value, grads[e.name]) for e, value in zip(chunk.exports, given) if e.grad_targets]
            if pairs:
                torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
        for edge, value in zip(chunk.imports, taken):
            if chunk.index in edge.grad_targets:
                if value.grad is None:
                    raise AssertionError(f"edge {edge.name} to chunk {chunk.index} should send a gradient and has none")
                grads[edge.name] = grads[edge.name] + value.grad if edge.name in grads else value.grad


def non_differentiable_bytes(chunks: Sequence[Chunk]) -> int:
    """Bytes that go from chunk to chunk and never send a gradient back (the batch itself does not count)."""
    return sum(
        max(edge.nbytes, 8) * len(edge.targets) for chunk in chunks for edge in chunk.exports if not edge.grad_targets
    )
