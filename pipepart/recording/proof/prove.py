"""Proof of a recording: it gives the outputs, buffers and gradients of the model, or is refused.

Tensors of a batch require no gradient, and the results of a model may depend on that. So the recording and the model first
run on the inputs as they are. Gradients of floating inputs are compared in a second pair of runs, with inputs that require one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording.inputs.leaves import named
from pipepart.recording.model_state import state
from pipepart.recording.op import op_of, set_op, where_is
from pipepart.recording.proof.blame import SeenValues, blame
from pipepart.recording.proof.differences import Difference, beyond_rounding, differences
from pipepart.recording.proof.outcome import Outcome
from pipepart.recording.proof.replay import Replay, replayed
from pipepart.recording.recorded import Recording
from pipepart.recording.recorded_run.runs import Call, RunFailed, Settings, original, run_once

__all__ = ["prove", "prove_call"]

_NOISE = 10.0
"""Factor by which a recording may differ more from the model than the model differs from itself."""
_ROUNDING = 1e-2
"""Largest relative difference that counts as noise of the model: sums in another order, not other numbers."""
_NOT_PROVED = "gradients of inputs: not proved, since"


def prove(
    recording: Recording,
    target: nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Raise a `CaptureError` that names the op at fault if the recording is not equal to `target` on this example.

    Loss, outputs, buffers, and gradients of all parameters and floating inputs are compared, from the same random state.
    Returns notes on everything that was not proved.
    """
    from pipepart.recording.record import call_of  # record imports this module: it proves its recordings

    call = call_of(target, args, kwargs, recording.root)
    call = dataclasses.replace(call, inputs=named(call.inputs))
    settings = Settings(whole=set(recording.leaves))
    with state.no_collection():
        return prove_call(recording, call, list(call.leaves), state.names_of(call.root), settings, None)


def prove_call(
    recording: Recording,
    call: Call,
    leaves: list[Any],
    names: state.Names,
    settings: Settings,
    mode: Any,
    known: Outcome | None = None,
) -> tuple[str, ...]:
    """Compare the recording with the model; returns notes on everything that was not proved.

    `known` is the outcome of the run that was recorded, if it was a run of the unchanged model on these leaves.
    """
    backward = mode is None and call.has_backward
    expected = known
    if expected is None or expected.failure:  # a backward may fail because of the recorder
        expected = original(call, leaves, mode, backward)
    proof = _Proof(recording, call, names, settings, mode, backward)
    notes = proof.compare(leaves, expected)
    if backward and not expected.failure:
        notes += proof.compare_inputs(leaves, expected)
    return tuple(notes)


@dataclass(frozen=True)
class _Proof:
    """A recording and the call that it was made of."""

    recording: Recording
    call: Call
    names: state.Names
    settings: Settings
    mode: Any
    """The fake mode of a model on the meta device; only shapes and dtypes are compared then."""
    backward: bool

    def compare(self, leaves: list[Any], expected: Outcome, modes: bool = True) -> list[str]:
        """Raise a `CaptureError` if the recording does not give the expected outcome; returns notes.

        Also fills in shapes and FLOPs of the example. Without `modes`, an op may require a gradient although it does not
        in the recorded model.
        """
        recording, notes = self.recording, []
        versions = {name: parameter._version for name, parameter in recording.root.named_parameters()}
        got, replay = replayed(recording, leaves, self.mode, expected.gradients is not None)
        changed = [name for name, p in recording.root.named_parameters() if p._version != versions.get(name)]
        found, reason = differences(got, expected, self.mode is not None), ""
        if expected.failure:
            notes.append(f"gradients: not proved, since the backward of the model itself fails ({expected.failure})")
        if found or got.failure:
            if self.mode is None:
                found, reason = self._explained(leaves, expected, got, found, 0.0 if changed else _ROUNDING)
            if found or got.failure:
                raise CaptureError(_refusal(recording, expected, got, found, reason, changed))
            notes.append("the model differs from itself from run to run; the recording differs no more than that")
        if modes:
            _check_modes(recording, replay)
        _fill(recording, replay)
        return notes

    def compare_inputs(self, leaves: list[Any], plain: Outcome) -> list[str]:
        """Compare gradients of floating inputs that require none; returns notes.

        This takes one more forward and backward of the model and of the recording. The inputs are results of an op,
        because only those may be changed in place if they require a gradient. `plain` is the outcome with the inputs as
        they are. Without a gradient there, nothing runs backward, and none of an input is ever used.
        """
        if plain.gradients is None:
            return []
        given = [_differentiable(leaf) for leaf in leaves]
        if all(new is old for new, old in zip(given, leaves)):
            return []
        try:
            expected = original(self.call, given, None, True)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:200]}"
            return [f"{_NOT_PROVED} the model refuses inputs that require one ({text})"]
        if expected.failure:
            return [f"{_NOT_PROVED} the backward of the model fails if inputs require one ({expected.failure})"]
        if differences(expected, plain):
            return [f"{_NOT_PROVED} the model gives other results if inputs require one"]
        return self.compare(given, expected, modes=False)

    def _explained(
        self, leaves: list[Any], expected: Outcome, got: Outcome, found: list[Difference], limit: float
    ) -> tuple[list[Difference], str]:
        """Return the differences that are larger than those between two runs of the model, and the op at fault.

        The model runs once more, op by op. Two runs of it may differ by up to `limit`.
        """
        model, recorded, recording = SeenValues(), SeenValues(), self.recording
        try:
            run = run_once(self.call, leaves, self.names, self.settings, None, self.backward, model)
        except RunFailed:
            return found, ""
        own = {(item.kind, item.name): _NOISE * item.size for item in differences(run.outcome, expected)}
        found = [item for item in found if item.size > min(limit, own.get((item.kind, item.name), 0.0))]
        backward = expected.gradients is not None
        found = beyond_rounding(found, got, recording.root, lambda: replayed(recording, leaves, None, backward)[0])
        if not found and not got.failure:
            return [], ""
        replayed(recording, leaves, None, backward, recorded)
        return found, blame(model, recorded, run.recorder, recording, found)


def _differentiable(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.requires_grad or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    with torch.enable_grad():
        return leaf.detach().clone().requires_grad_().clone()


def _check_modes(recording: Recording, replay: Replay) -> None:
    """Raise a `CaptureError` for an op that runs with gradients in the recording and without in the model, or vice versa."""
    for node in recording.ops:
        if node.op == "output" or node.name not in replay.seen:
            continue
        meta = op_of(node)
        requires_grad = replay.seen[node.name][3]
        if requires_grad != meta.requires_grad and meta.shape is not None and not meta.inplace:
            raise CaptureError(
                f"{type(recording.root).__name__}: op {node.name} ({where_is(node)}) "
                f"{'requires' if requires_grad else 'does not require'} a gradient in the recorded graph, and "
                f"{'does' if meta.requires_grad else 'does not'} in the model: it is run in another gradient mode\n"
                "  do: report it as a bug, with the op"
            )


def _fill(recording: Recording, replay: Replay) -> None:
    """Fill in shapes and FLOPs of the example."""
    for node in recording.ops:
        op = dataclasses.replace(op_of(node), flops=replay.flops.get(node.name, 0))
        if op.shape is not None and node.name in replay.seen:
            shape, dtype, size, _ = replay.seen[node.name]
            op = dataclasses.replace(op, shape=shape, dtype=dtype, output_bytes=size)
        set_op(node, op)


def _refusal(
    recording: Recording,
    expected: Outcome,
    got: Outcome,
    found: list[Difference],
    reason: str,
    changed: Sequence[str],
) -> str:
    name = type(recording.root).__name__
    where = f"  where: {reason}\n" if reason else ""
    if not found:
        return (
            f"{name}: the backward of the recorded graph fails, but that of the model does not: {got.failure}\n{where}"
        )
    first = found[0]
    if first.kind == "gradient of":
        count = sum(item.kind == "gradient of" for item in found)
        return (
            f"{name}: the recorded graph does not give the gradients of the model: {first}; {count} of "
            f"{len(expected.gradients or ())} gradients differ.\n{where}"
            "  likely: the recorder does not see how this op computes its gradient\n"
            "  do: write it as a torch.autograd.Function or a submodule of its own, which is then one op"
        )
    if changed:
        names = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        likely = (
            f"  because: the step changes parameters in place ({names}), which would happen once for each micro-batch\n"
            "  do: update them between steps (on_train_batch_end, or the callback WeightEMA)"
        )
    else:
        likely = (
            "  likely: the model draws random numbers outside torch, or keeps results of an earlier call in Python objects\n"
            "  do: make it a function of its inputs, its parameters and torch's random numbers"
        )
    return f"{name}: the recorded graph gives other results than the model: {first}.\n{where}{likely}"
