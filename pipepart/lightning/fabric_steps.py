"""Steps of a Fabric program: functions that use the module of `fabric.setup`, recorded and run as a pipeline.

A Fabric program calls its module, computes a loss and hands it to `fabric.backward`. A pipeline needs all of that as one
function, since it runs forward and backward of the micro-batches interleaved:

    step = fabric.strategy.step(function) -> loss = step(batch): all micro-batches, forward and backward
    fabric.backward(loss)                 -> the gradients of that step are added to `.grad`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipepart.build import Built, Example, Job, Recorded, Step, add_step, build, example_microbatch
from pipepart.build.step_variants import Variants, empty_replica
from pipepart.build.verification import verification
from pipepart.devices import to_device
from pipepart.errors import CaptureError, ConfigError
from pipepart.lightning.announce import tell
from pipepart.recording import Recording, record
from pipepart.recording.inputs import trees
from pipepart.recording.model_state.places import Place
from pipepart.runtime import StageRuntime, StepRequest
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import broadcast_object
from pipepart.runtime.microbatch import Whole
from pipepart.samples.pieces import pieces_of

__all__ = ["FunctionSteps", "Parked", "PipelinedModule", "StepFunction"]


@dataclass(eq=False)
class StepFunction:
    """A function of the user that runs as a pipeline. It returns what the function returns, for the whole batch."""

    run: Callable[[StepFunction, tuple[Any, ...], dict[str, Any]], Any]
    function: Callable[..., Any]
    name: str
    """A name that no other step of the program has."""

    def __post_init__(self) -> None:
        self.__doc__ = getattr(self.function, "__doc__", None)
        self.__name__ = getattr(self.function, "__name__", self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, args, kwargs)


class Parked:
    """The gradients of one step on this rank, which wait until the loss of that step is handed to `fabric.backward`.

    They are kept by that loss, so they are released with a loss that nobody hands over.
    """

    def __init__(self, gradients: dict[str, torch.Tensor], reduced: bool, used: Callable[[Parked], None]) -> None:
        """`reduced`: they are the means over replicas. `used` is called in each backward of the loss."""
        self.reduced, self._used = reduced, used
        self.gradients: dict[str, torch.Tensor] | None = gradients
        """None after they were handed over."""
        self.factor = 0.0
        """The derivative of what is handed to `fabric.backward` by the loss of the step."""

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        """The value as a loss on which arithmetic works (`loss / 4`, `loss + other`)."""
        anchor = torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)
        made: torch.Tensor = _Loss.apply(anchor, value.detach(), self)  # type: ignore[no-untyped-call]
        return made

    def note(self, factor: float) -> None:
        self._used(self)
        self.factor += factor


class _Loss(torch.autograd.Function):
    """The loss of a step whose backward has run already. Its backward notes the derivative."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, parked: Parked) -> torch.Tensor:  # type: ignore[override]
        ctx.parked = parked
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.parked.note(float(gradient))
        return None, None, None


class FunctionSteps:
    """The recordings of the functions of one module, and the runtime that executes them."""

    def __init__(
        self,
        job: Job,
        recording: Callable[[], AbstractContextManager[None]],
        planned: Callable[[StageRuntime], None],
    ) -> None:
        """`recording` is the context in which functions are recorded; `planned` gets each new plan, on every rank."""
        self._job, self._recording, self._plan_made = job, recording, planned
        self.runtime: StageRuntime | None = None
        self._trains = False
        """Whether the plan is one for training."""
        self._variants: dict[str, Variants] = {}
        self._counts: dict[str, int] = {}

    def train(
        self,
        step: StepFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reduce: bool,
        used: Callable[[Parked], None],
    ) -> Any:
        """Run forward and backward of all micro-batches, and return the result with a loss for `fabric.backward`."""
        name, leaves, key = self._find(step, args, kwargs, True, reduce)
        runtime = self._planned
        request = StepRequest(leaves=leaves, outputs_everywhere=True, reduce=reduce, draw_key=self._draw(key))
        result = runtime.train(request, name)
        parked = Parked(runtime.parameters.take_gradients(), reduce, used)
        recording = runtime.recording(name)
        assert recording.loss_index is not None
        outputs = list(result.outputs)
        outputs[recording.loss_index] = parked.loss(outputs[recording.loss_index])
        return recording.unflatten(outputs)

    def evaluate(self, step: StepFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of all micro-batches, and return the result on every rank."""
        name, leaves, key = self._find(step, args, kwargs, False, False)
        request = StepRequest(leaves=leaves, outputs_everywhere=True, draw_key=self._draw(key))
        result = self._planned.evaluate(request, name)
        return self._planned.recording(name).unflatten(result.outputs)

    @property
    def _planned(self) -> StageRuntime:
        assert self.runtime is not None
        return self.runtime

    def _draw(self, key: str) -> int | None:
        self._counts[key] = self._counts.get(key, -1) + 1
        return self._planned.seeds.of_step(key, self._counts[key])

    # ---- recordings

    def _find(
        self, step: StepFunction, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool, reduce: bool
    ) -> tuple[str, Any, str]:
        """The name of a recording that holds for this call, its leaves on the first stage, and the key of the step."""
        mode = "train" if self._job.root.training else "eval"
        key = f"{step.name}:{mode}" if trains else f"{step.name}:{mode}:no_grad"
        if self.runtime is None or (trains and not self._trains):
            self._build(step, key, (args, kwargs), trains)
        runtime, variants = self._planned, self._variants.setdefault(key, Variants(key))
        flatten = self._flattener(args, kwargs)
        known = variants.names[0] if variants.names else next(iter(runtime.steps.programs))
        together = trains and reduce
        for strict in (False, True):
            empty = empty_replica((args, kwargs), known, runtime, all_replicas=together) if not strict else 0
            name, leaves = variants.choose(flatten, runtime, empty=empty)
            if name is not None:
                return name, leaves, key
            if not strict:
                self._add(variants, step, (args, kwargs), trains)
        raise CaptureError(
            f"{step.name}: the recording that was made on this batch does not hold for this batch. Expected a function that "
            "reads the same values in each call on one batch. Change counters outside of it."
        )

    def _build(self, step: StepFunction, key: str, batch: Any, trains: bool) -> None:
        """Record the function on the batch of rank 0, agree on a plan, and keep this rank's stage."""
        if self.runtime is not None:  # planned for evaluation
            self.runtime.parts.make_whole(self._job.device)
            self.runtime, self._variants = None, {}
        groups = self._job.groups
        if groups is not None:
            with guarded(groups):
                batch = broadcast_object(batch, 0, groups)
        batch = trees.moved(batch, self._job.device)
        first = Step(key, lambda example: Recorded(self._record(step, example, trains), counts=True), trains)
        with self._recording():
            made = build(self._job, first, batch)
        self.runtime, self._trains = made.runtime, trains
        self._variants[key] = Variants(key, [key], 1)
        self._plan_made(made.runtime)
        tell(self._describe(step, made))

    def _describe(self, step: StepFunction, built: Built) -> str:
        notes = "".join(f"\nnote       {note}" for note in built.notes)
        text = f"pipepart: {step.name}\n{built.runtime.plan.describe()}{notes}{built.samples.lines}\n"
        if built.reference is not None:
            loss = built.recorded.recording.loss_index or 0
            names = {i: "loss" if i == loss else f"output {i}" for i in range(len(built.reference.whole))}
            text += verification(built.runtime, built.reference, names) + "\n"
        return text

    def _record(self, step: StepFunction, example: Example, trains: bool, numbers: Sequence[Place] = ()) -> Recording:
        args, kwargs = example.batch
        with torch.set_grad_enabled(trains):
            recording = record(
                step.function,
                args,
                kwargs,
                root=self._job.root,
                numbers=numbers,
                batching=example.batching,
                others=example.others,
            )
        if trains and recording.loss_index is None:
            raise ConfigError(
                f"{step.name} returned no loss: expected a scalar tensor that requires grad, or a dict with one under 'loss'; "
                f"got {recording.output_tree}. To evaluate, call it inside `with torch.no_grad():`."
            )
        return recording

    def _add(self, variants: Variants, step: StepFunction, batch: Any, trains: bool) -> None:
        """Record a function when it is first needed, or once more, on the batch of the first stage of this replica."""
        name, runtime, groups = variants.new_name(), self._planned, self._job.groups
        if groups is not None:
            with guarded(groups):
                source = groups.rank_of_stage(runtime.plan.placement[0])
                batch = broadcast_object(batch, source, groups, inside_replica=True)
        batch = trees.moved(batch, self._job.device)
        options = replace(self._job.options, plan=None, microbatches=runtime.plan.microbatches)
        part = example_microbatch(batch, options, self._job.mesh, self._job.root, call=True, fewer=True)

        def again(example: Example) -> Recorded:
            recording = variants.record(lambda numbers: self._record(step, example, trains, numbers), runtime)
            return Recorded(recording, counts=True)

        with runtime.parts.gathered(), self._recording():
            flatten = self._flattener(*part.batch)
            _, samples = add_step(self._job, runtime, Step(name, again, trains), batch, part, flatten)
        if samples.text:
            tell(f"pipepart: {name}{samples.lines}\n")
        variants.added(name, runtime)

    def _flattener(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Recording], list[Any]]:
        """A function that returns the leaves of a call as a recording takes them, on the device of this rank."""
        runtime, device = self._planned, self._job.device

        def moved(leaves: list[Any]) -> list[Any]:
            return [to_device(leaf, device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        def flatten(recording: Recording) -> list[Any]:
            leaves, given = moved(recording.flatten(args, kwargs)), (args, kwargs)
            pieces = pieces_of(given, runtime.root, runtime.options.batch_dim, True, runtime.plan.microbatches)
            if pieces is None:
                return leaves
            return Whole(leaves, pieces, given, lambda call: moved(recording.flatten(*call)))

        return flatten


class PipelinedModule(nn.Module):
    """The module that `fabric.setup` wraps. Its call outside of a step is an evaluation, or refused."""

    def __init__(self, original: nn.Module, evaluate: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """`evaluate` runs the module, or a method of it, as a pipeline."""
        super().__init__()
        self.original = original
        self._evaluate = evaluate
        self.recording = False
        """Whether a step is recorded, which runs the module itself."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, a call is one of the module itself."""
        before, self.recording = self.recording, True
        try:
            yield
        finally:
            self.recording = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.recording:
            return self.original(*args, **kwargs)
        target, name = self._called()
        if torch.is_grad_enabled():
            raise ConfigError(
                f"{name} was called outside of a step. A pipeline runs forward and backward of its "
                "micro-batches interleaved, so it needs the way from the batch to the loss as a function:\n\n"
                "    @fabric.strategy.step\n    def step(x, y):\n        return criterion(model(x), y)\n\n"
                "    loss = step(x, y)\n    fabric.backward(loss)\n\n"
                "Inside `with torch.no_grad():` the module can be called as it is."
            )
        return self._evaluate(target, args, kwargs)

    def _called(self) -> tuple[Any, str]:
        """What the user has called: the module, or a method, for whose call Fabric has replaced `forward`; and its name."""
        name, replaced = type(self.original).__name__, vars(self.original).get("forward")
        cells = getattr(replaced, "__closure__", None) or ()
        inside = dict(zip(replaced.__code__.co_freevars, cells)) if replaced is not None and cells else {}
        if not {"method_name", "original_forward"} <= inside.keys():
            return self.original, name
        method = inside["method_name"].cell_contents
        self.original.forward = inside["original_forward"].cell_contents
        return getattr(self.original, method), f"{name}.{method}"
