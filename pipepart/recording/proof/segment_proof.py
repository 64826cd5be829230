"""Proof of the segments of a step: run one after the other, they give the values and gradients of the whole recording."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pipepart.devices import generators
from pipepart.errors import CaptureError
from pipepart.recording.execution.draws import set_key
from pipepart.recording.execution.ops_run import resolve
from pipepart.recording.model_state import state
from pipepart.recording.proof.differences import differ, largest_of
from pipepart.recording.proof.outcome import gradients_of
from pipepart.recording.recorded import Recording
from pipepart.recording.segments import Act, Segment

__all__ = ["prove_segments", "restored_after", "trained_only"]

_KEY = 1
Gradients = dict[str, torch.Tensor | None]


def prove_segments(
    recording: Recording,
    segments: Sequence[Segment],
    acts: Sequence[Act],
    frozen: Sequence[Collection[str]],
    leaves: Sequence[Any],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Raise a `CaptureError` if the segments do not give the outputs, the buffers and the gradients of the recording.

    Parameters do not change between segments here. Models on the meta device are not run.
    """
    root = recording.root
    if state.is_abstract(root, recording.device):
        return
    names = [name for name, parameter in root.named_parameters() if parameter.requires_grad]
    losses = {act.loss: act.text for act in acts if act.loss is not None}
    with _drawing(recording), torch.enable_grad():
        with context():
            values = recording.graph_module()(*_copies(leaves))
        wanted = {index: _gradients(root, values[index], names) for index in losses}
        values = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
        buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    carried: dict[str, Any] = {}
    ever = frozenset(name for names_then in frozen for name in names_then)
    with _drawing(recording):
        for segment in segments:
            given = [*_copies(leaves), *(carried[name] for name in segment.takes)]
            with trained_only(root, segment.trained), restored_after(root, segment.restored), torch.enable_grad():
                with context():
                    made = segment.recording.graph_module()(*given)
                if segment.has_loss:
                    loss = segment.makes[0]
                    assert isinstance(loss, int)
                    got = _gradients(root, made[0], sorted(segment.trained))
                    _compare_gradients(losses[loss], got, wanted[loss], ever)
            for what, value in zip(segment.makes, made):
                if isinstance(what, str):
                    carried[what] = value.detach()
                elif isinstance(value, torch.Tensor) and differ(value.detach(), values[what]):
                    raise _wrong(f"output {what} differs")
        for name, buffer in root.named_buffers():
            if differ(buffer, buffers[name]):
                raise _wrong(f"buffer {name} differs")


def _compare_gradients(text: str, got: Gradients, wanted: Gradients, frozen: Collection[str]) -> None:
    largest = largest_of(wanted.values())
    for name, gradient in wanted.items():
        if name in got:
            if differ(got[name], gradient, largest):
                raise _wrong(f"{text}: the gradient of {name} differs")
        elif gradient is not None and name not in frozen:
            raise _wrong(f"{text}: there is no gradient of {name}")


def _wrong(what: str) -> CaptureError:
    return CaptureError(
        f"the step was cut into segments between its backwards, and they do not compute what the whole step does: {what}. "
        "Please report this with the step; without it, use automatic optimization."
    )


def _copies(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _gradients(root: nn.Module, loss: torch.Tensor, names: Sequence[str]) -> Gradients:
    tensors = {name: resolve(root, name) for name in names}
    return gradients_of([loss], [torch.ones_like(loss)], tensors, retain=True)


@contextmanager
def _drawing(recording: Recording) -> Iterator[None]:
    """Draw the same random numbers for an op whenever it is run; the state of the model is restored afterwards."""
    with state.preserved(recording.root):
        set_key(_KEY, generators(recording.device))
        try:
            yield
        finally:
            set_key(None)


@contextmanager
def trained_only(
    root: nn.Module, names: Collection[str], parameters: Sequence[tuple[str, nn.Parameter]] | None = None
) -> Iterator[None]:
    """Inside, only these parameters require gradients. `parameters`: all that matter here; default: those of the root."""
    found = list(root.named_parameters()) if parameters is None else parameters
    changed = [(p, p.requires_grad) for name, p in found if p.requires_grad != (name in names)]
    for parameter, flag in changed:
        parameter.requires_grad_(not flag)
    try:
        yield
    finally:
        for parameter, flag in changed:
            parameter.requires_grad_(flag)


@contextmanager
def restored_after(root: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Set these buffers back afterwards: ops that run again have changed them before."""
    buffers = [(buffer, buffer.detach().clone()) for name, buffer in root.named_buffers() if name in names]
    try:
        yield
    finally:
        for buffer, before in buffers:
            if not buffer.is_meta:
                buffer.data.copy_(before)
