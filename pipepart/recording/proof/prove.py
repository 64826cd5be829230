"""Prove a recording again, on any example: hold it against the model that it was made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn

from pipepart.recording.inputs.leaves import named
from pipepart.recording.model_state import state
from pipepart.recording.proof.against import prove_inputs, rerun
from pipepart.recording.proof.compare import verify
from pipepart.recording.record import call_of
from pipepart.recording.recording import Recording
from pipepart.recording.trace.runs import Settings, original

__all__ = ["prove"]


def prove(
    recording: Recording,
    target: nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Raise a `CaptureError` that names the op at fault if the recording is not what `target` does with this example.

    Loss, outputs, buffers, the gradients of all parameters and of all floating inputs are compared, from the same random
    state. Returns notes on what was not proved.
    """
    call = call_of(target, args, kwargs, recording.root)
    call = dataclasses.replace(call, inputs=named(call.inputs))
    leaves = list(call.leaves)
    settings = Settings(whole=set(recording.leaves))
    with state.no_collection():
        expected = original(call, leaves, None, call.has_backward)
        names = state.names_of(call.root)
        again = rerun(call, leaves, names, settings, call.has_backward)
        notes = verify(recording, leaves, expected, None, again)
        if call.has_backward and not expected.failure:
            notes += prove_inputs(recording, call, leaves, expected, names, settings)
        return notes
