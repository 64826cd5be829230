"""`Pipeline` for plain PyTorch loops: one process per device, started by torchrun.

This module knows `build` and `runtime`. It must not know Lightning or reports.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipepart.build import Example, Job, Recorded, Step, add_step, build
from pipepart.build.batch_verdict import SamplesMeet
from pipepart.build.job import root_of, seed_of_rank_zero
from pipepart.build.job_devices import place_model, place_part
from pipepart.build.step_variants import Variants, empty_replica, leaves_ahead, leaves_of_series
from pipepart.build.verification import verification
from pipepart.devices import limit_threads, to_device
from pipepart.errors import PlanError
from pipepart.options import Options
from pipepart.planning import Plan
from pipepart.planning.compile_mode import CompileOption
from pipepart.planning.head_mode import HeadOption
from pipepart.planning.request import ScheduleName
from pipepart.planning.sync_mode import SyncOption
from pipepart.recording import Recording, record
from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import BatchDim
from pipepart.recording.model_state.places import Place
from pipepart.runtime.failure import guarded
from pipepart.runtime.mesh import Groups, Mesh, fit_mesh
from pipepart.runtime.microbatch import Whole
from pipepart.runtime.program import StepRequest
from pipepart.runtime.rendezvous import join_job, processes_on_this_host, world_size
from pipepart.runtime.stage_values import StageValues
from pipepart.runtime.watcher import watch
from pipepart.samples.batch_numbers import NOT_KNOWN_AHEAD, EqualWeights
from pipepart.samples.pieces import pieces_of
from pipepart.schedule import Timeline

__all__ = ["Pipeline"]

_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call: positional ones and keyword arguments."""


class Pipeline(StageValues):
    """A model, or a step that returns its loss, spread over the processes of this job.

    ```python
    model = MyModel()                                   # built the same way on every rank
    pipe = Pipeline(model, (inputs, targets), stages=2, microbatches=8)
    optimizer = torch.optim.AdamW(pipe.parameters())    # this rank's share
    for inputs, targets in loader:
        loss = pipe.step(inputs, targets)               # all micro-batches, forward and backward
        optimizer.step()
        optimizer.zero_grad()
    ```

    `module_or_step` is a module whose forward returns the loss, or a bound method of a module that returns it. The example
    has the shapes of a whole batch. Under `torchrun` every rank makes the same calls, and each replica uses the batch of
    its first stage. `plan` is a plan or the path of its file. `device` is the device of this rank, or its type; by default it
    is the accelerator with the number of the process on its host, or the CPU.
    """

    def __init__(
        self,
        module_or_step: nn.Module | Callable[..., Any],
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        plan: Plan | str | Path | None = None,
        stages: int | Literal["auto"] = "auto",
        replicas: int | Literal["auto"] = "auto",
        microbatches: int | Literal["auto"] = "auto",
        schedule: ScheduleName | str = "auto",
        chunks: int | Literal["auto"] = "auto",
        slack: int | Literal["auto"] = "auto",
        keep_together: Sequence[Sequence[str]] = (),
        split_at: Sequence[str] | None = None,
        timeout: float = 300.0,
        transport: Literal["auto", "group", "shared_memory"] = "auto",
        recompute: bool | Literal["auto"] = "auto",
        memory_limit: float | None = None,
        head: HeadOption = "auto",
        batch_norm: Literal["microbatch", "batch"] = "microbatch",
        loss: Literal["batch", "microbatch"] = "batch",
        randomness: Literal["op", "stage"] = "op",
        verify: bool = False,
        batch_dim: BatchDim = 0,
        sync: SyncOption = "mean",
        compile: CompileOption = False,
        device: str | torch.device | None = None,
    ) -> None:
        options = Options.among(locals())
        self._device = join_job(timedelta(seconds=timeout), device)
        mesh = fit_mesh(world_size(), options.stages, options.replicas)
        limit_threads(processes_on_this_host())
        groups = Groups.create(mesh, timedelta(seconds=timeout), self._device) if mesh.world_size > 1 else None
        watch(groups)
        self._target = module_or_step
        with guarded(groups):  # no rank waits for one that has failed
            text = self._build(tuple(example_args), dict(example_kwargs or {}), options, mesh, groups)
        if text and (groups is None or groups.rank == 0):
            warnings.warn(text, SamplesMeet, stacklevel=2)
        self._variants = {name: Variants(name, [name], 1) for name in ("step", "evaluate")}
        self._nothing = nn.Parameter(torch.empty(0, device=self._device))
        self._runtime.parameters.stand_in = self._nothing
        self._tracing = False
        self._accumulating = False
        self._continues = False
        """Whether the last step was inside `accumulate`, so that its gradients are added to those of the next."""
        self.steps_done = self.evaluations_done = 0
        """The counts from which `randomness="op"` derives seeds. Set them when a run is resumed from a checkpoint."""

    def _build(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, mesh: Mesh, groups: Groups | None
    ) -> str:
        """Record on the first micro-batch, agree on a plan and keep the stage of this rank; return the text on samples."""
        root = root_of(self._target)
        whole = place_model(root, self._device, groups)
        self._batch = trees.moved((args, kwargs), self._device)
        self._job = Job(root, options, mesh, groups, self._device, call=True)
        training: list[Recording] = []

        def evaluation(example: Example) -> Recorded:
            return Recorded(self._record(example, like=training[0]), counts=True)

        def step(example: Example) -> Recorded:
            training.append(self._record(example))
            return Recorded(training[0], counts=True)

        built = build(
            self._job,
            Step("step", step, mode=root.train),
            self._batch,
            [Step("evaluate", evaluation, trains=False, mode=root.eval)],
        )
        if not whole:  # too large for one device: this rank moves its part
            place_part(root, self._device)
            built.runtime.parts.gathers_on_host = True
        self._runtime, self._example = built.runtime, built.example
        if built.reference is not None:
            loss, values = training[0].loss_index or 0, range(len(built.reference.whole))
            names = {loss: "loss", **{i: f"output {i}" for i in values if i != loss}}
            table = verification(self._runtime, built.reference, names)
            if groups is None or groups.rank == 0:
                notes = [f"note       {note}" for note in training[0].notes if note.startswith("gradients")]
                print("\n".join([table, *notes]), flush=True)
        self._runtime.parameters.follows_optimizers = True
        self._runtime.seeds.seed = seed_of_rank_zero(groups)
        return built.samples.text

    def _record(self, example: Example, like: Recording | None = None, numbers: Sequence[Place] = ()) -> Recording:
        options: dict[str, Any] = {"batching": example.batching, "others": example.others}
        return record(self._target, *example.batch, like=like, numbers=numbers, **options)

    @property
    def plan(self) -> Plan:
        """The plan that this job runs."""
        return self._runtime.plan

    @property
    def module(self) -> nn.Module:
        """The module of the user with all its names. The use of a parameter of another stage raises an error that names it."""
        return self._runtime.root

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self._runtime.stage

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The replicas and stages as a `torch.distributed` mesh; None in a job of one process."""
        return self._runtime.groups.device_mesh if self._runtime.groups is not None else None

    # ---- running

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one training step and add its gradients to `.grad` of the parameters of this stage.

        Returns the result for the whole batch of this replica: the loss and other scalars on every rank; tensors with a
        batch dimension on the last stage (None elsewhere).
        """
        return self._step(args, kwargs, ())

    def steps(self, batches: Sequence[Sequence[Any] | Mapping[str, Any]]) -> list[Any]:
        """Run one training step on each batch of a window, and return the result of each.

        A batch is a tuple of arguments or a dict of keyword arguments. In contrast to `accumulate`, all batches are known
        from the beginning, so that a loss whose terms have different denominators (`mlm / tokens + nsp / pairs`) is
        divided by those of all batches. As in a loop that calls `backward` for each batch, `.grad` is `len(batches)` times
        the gradient of all of them at once; for a plain sum it is the gradient of all of them.

        ```python
        pipe.steps([(inputs, targets) for inputs, targets in islice(loader, 4)])
        optimizer.step()
        ```
        """
        calls, results = [_call_of(batch) for batch in batches], []
        for index, call in enumerate(calls):
            last = index == len(calls) - 1
            with nullcontext() if last else self.accumulate():
                results.append(self._step(*call, calls[1:] if index == 0 else ()))
        return results

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any], ahead: Sequence[_Call]) -> Any:
        self.module.train()
        name, leaves = self._recording_for("step", args, kwargs)
        windowed = self._runtime.weighed(name).needs_window
        if windowed and self._accumulating and not self._continues and not ahead:
            text = f"{NOT_KNOWN_AHEAD}. Use Pipeline.steps([batch, batch]), which gets all of them at once."
            warnings.warn(text, EqualWeights, stacklevel=3)
        coming = [self._leaves_ahead(name, call) for call in ahead] if windowed and self._runtime.is_first else []
        key = self._runtime.seeds.of_step("step", self.steps_done)
        self.steps_done += 1
        request = StepRequest(
            leaves=leaves, trace=self._tracing, reduce=not self._accumulating, continues=self._continues, ahead=coming,
            draw_key=key,
        )  # fmt: skip
        result = self._runtime.train(request, name)
        self._continues = self._accumulating
        self._runtime.hand_over()
        self._nothing.grad = torch.zeros_like(self._nothing)
        return self._runtime.recording(name).unflatten(result.outputs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the gradients of steps inside on this rank; the next step outside reduces all of them together.

        All replicas must run the same number of steps inside.

        ```python
        with pipe.accumulate():
            pipe.step(first_half)
        pipe.step(second_half)  # now `.grad` has the sum of both, over all replicas
        ```

        The weights of batches follow the denominators of their losses (tokens, samples): `.grad` is twice the gradient of
        both batches at once. If terms of a loss have different denominators, the batches have equal weights, with a
        warning. `steps` gets all batches at once, and is exact for such losses.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in eval mode, and return the merged outputs on every rank."""
        with self._evaluating():
            name, leaves = self._recording_for("evaluate", args, kwargs)
            return self._evaluate(name, leaves)

    def evaluations(self, batches: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Iterator[Any]:
        """Run `evaluate` on each batch, and return an iterator over the outputs, in order. The pipeline stays full meanwhile.

        A batch is a tuple of arguments or a dict of keyword arguments. Some batches are read and run before the outputs of the
        first of them are given: parameters must not change meanwhile. Every rank must iterate in the same way.

        ```python
        for outputs in pipe.evaluations((inputs,) for inputs, targets in loader):
            ...
        ```
        """
        calls, waiting = map(_call_of, batches), deque[_Call]()
        for call in calls:
            waiting.append(call)
            while waiting:
                yield from self._in_series(waiting, calls)

    def _in_series(self, waiting: deque[_Call], more: Iterator[_Call]) -> Iterator[Any]:
        """Yield the outputs of the batch that has waited longest, and of those after it that can run in a series with it."""
        runtime = self._runtime
        with self._evaluating():
            name, leaves = self._recording_for("evaluate", *waiting[0])
            series = runtime.series(name)
            if series is None:
                waiting.popleft()
                outputs = self._evaluate(name, leaves)
        if series is None:
            yield outputs
            return
        recording, known = runtime.recording(name), [leaves]

        def feed() -> int:
            waiting.extend(islice(more, max(0, series.window - len(waiting))))
            with self._evaluating():
                later = [self._flattener(*call) for call in islice(waiting, len(known), series.window)]
                leaves = [*known, *leaves_of_series(later, recording, runtime)]
                requests = [self._request(own, number) for number, own in enumerate(leaves)]
                count = series.run(requests) if requests else 0
            known.clear()
            self.evaluations_done += count
            for _ in range(count):
                waiting.popleft()
            return count

        for result in series.results(feed):
            yield recording.unflatten(result.outputs)

    def _evaluate(self, name: str, leaves: list[Any] | None) -> Any:
        """Run one batch, and return its outputs."""
        result = self._runtime.evaluate(self._request(leaves, 0), name)
        self.evaluations_done += 1
        return self._runtime.recording(name).unflatten(result.outputs)

    def _request(self, leaves: list[Any] | None, number: int) -> StepRequest:
        """Return the request for the evaluation of a batch; `number`: the batches before it that have not run yet."""
        key = self._runtime.seeds.of_step("evaluate", self.evaluations_done + number)
        return StepRequest(leaves=leaves, outputs_everywhere=True, draw_key=key)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside, the module is in eval mode, and no gradients are recorded."""
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(was_training)

    def _recording_for(self, step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the name of a recording that holds for the current Python state and, on the first stage, its leaves."""
        variants, flatten = self._variants[step], self._flattener(args, kwargs)
        together = step == "step" and not self._accumulating
        empty = empty_replica((args, dict(kwargs)), variants.names[0], self._runtime, all_replicas=together)
        name, leaves = variants.choose(flatten, self._runtime, strict=True, empty=empty)
        if name is None:
            self._add(variants, step)
            name, leaves = variants.choose(flatten, self._runtime, strict=True)
        if name is None:  # the new recording holds for the example: the run raises the reason for this batch
            name = variants.names[0]
            leaves = flatten(self._runtime.recording(name)) if self._runtime.is_first else None
        return name, leaves

    def _flattener(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Recording], list[Any]]:
        def flatten(recording: Recording) -> list[Any]:
            leaves = self._on_device(recording.flatten(args, kwargs))
            given, options = (args, kwargs), self._runtime.options
            pieces = pieces_of(given, self.module, options.batch_dim, True, self.plan.microbatches)
            if pieces is None:
                return leaves
            return Whole(leaves, pieces, given, lambda call: self._on_device(recording.flatten(*call)))

        return flatten

    def _leaves_ahead(self, name: str, call: _Call) -> list[Any] | None:
        """Return the leaves of a later batch, or None if the recording does not hold for it."""
        return leaves_ahead(self._flattener(*call), self._runtime.recording(name), self.plan.microbatches)

    def _on_device(self, leaves: list[Any]) -> list[Any]:
        return [to_device(leaf, self._device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    @torch.enable_grad()
    def _add(self, variants: Variants, step: str) -> None:
        """Record the step on the example again, since the Python state has changed."""
        runtime, name = self._runtime, variants.new_name()

        def again(example: Example) -> Recorded:
            made = variants.record(lambda numbers: self._record(example, runtime.recording(step), numbers), runtime)
            return Recorded(made, counts=True)

        with runtime.parts.gathered():
            added = Step(name, again, trains=step == "step")
            example = self._example
            add_step(self._job, runtime, added, self._batch, example, lambda found: found.flatten(*example.batch))
        variants.added(name, runtime)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Measure every action of the training steps inside. `trace` is the timeline of the last one.

        ```python
        with pipe.tracing():
            pipe.step(inputs, targets)
        print(pipe.trace.step_time)
        ```
        """
        before, self._tracing = self._tracing, True
        try:
            yield
        finally:
            self._tracing = before

    @property
    def trace(self) -> Timeline:
        """The measured timeline of the last traced step, of all stages of this replica."""
        if self._runtime.timeline is None:
            raise PlanError("no step was traced. Call step() inside `with pipe.tracing():`.")
        return self._runtime.timeline


def _call_of(batch: Sequence[Any] | Mapping[str, Any]) -> _Call:
    return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
