"""Hold a recording against the call that it was made of: with the inputs as they are, and by the gradients of the inputs.

Inputs of a batch require no gradient, and the model may look at that, so the proof runs both with the inputs as they are.
The gradients of floating inputs are seen in a second pair of runs, with inputs that require one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipepart.recording.model_state import state
from pipepart.recording.proof.blame import Trace, TracedGraph
from pipepart.recording.proof.compare import Rerun, verify
from pipepart.recording.proof.outcome import Outcome, differences
from pipepart.recording.recording import Recording
from pipepart.recording.trace.runs import Call, Run, RunFailed, Settings, original, run_once

__all__ = ["prove_call", "prove_inputs", "rerun"]

_NOT_PROVED = "gradients of inputs: not proved, since"


def prove_call(
    recording: Recording,
    call: Call,
    leaves: list[Any],
    base: Run,
    names: state.Names,
    settings: Settings,
    mode: Any,
    as_it_is: bool,
) -> tuple[str, ...]:
    """Hold the recording against the model; against the very run that was recorded, if that was the model as it is."""
    backward = mode is None and call.has_backward
    expected = base.outcome if as_it_is else original(call, leaves, mode, backward)
    if as_it_is and expected.failure:  # it may be the recorder that backward cannot do with
        expected = original(call, leaves, mode, backward)
    notes = verify(recording, leaves, expected, mode, rerun(call, leaves, names, settings, backward))
    if backward and not expected.failure:
        notes += prove_inputs(recording, call, leaves, expected, names, settings)
    return notes


def prove_inputs(
    recording: Recording, call: Call, leaves: list[Any], plain: Outcome, names: state.Names, settings: Settings
) -> tuple[str, ...]:
    """Compare the gradients of floating inputs that require none, too; returns notes on what was not proved.

    Takes one more forward and backward of the model and of the recording. The inputs are results of an op, as changes
    in place of what requires a gradient are allowed there only. `plain` is the outcome with the inputs as they are.
    """
    given = [_differentiable(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(given, leaves)):
        return ()
    try:
        expected = original(call, given, None, True)
    except Exception as error:
        return (
            f"{_NOT_PROVED} the model refuses inputs that require one ({type(error).__name__}: {str(error)[:200]})",
        )
    if expected.failure:
        return (f"{_NOT_PROVED} the backward of the model fails if inputs require one ({expected.failure})",)
    if differences(expected, plain):
        return (f"{_NOT_PROVED} the model computes something else if inputs require one",)
    again = rerun(call, given, names, settings, True)
    return verify(recording, given, expected, None, again, modes=False)


def _differentiable(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.requires_grad or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    with torch.enable_grad():
        return leaf.detach().clone().requires_grad_().clone()


def rerun(
    call: Call, leaves: list[Any], names: state.Names, settings: Settings, backward: bool
) -> Callable[[Trace], Rerun | None]:
    """How the model is run once more, op by op; None if that fails."""

    def again(trace: Trace) -> Rerun | None:
        try:
            run = run_once(call, leaves, names, settings, None, backward, trace)
        except RunFailed:
            return None
        return Rerun(run.outcome, TracedGraph(run.recorder.graph, run.recorder.facts))

    return again
