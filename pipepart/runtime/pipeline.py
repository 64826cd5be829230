"""Pipelines for plain PyTorch loops: one process per device, started by torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipepart.capture import Recording, record
from pipepart.errors import PlanError
from pipepart.planning import Plan, check_request
from pipepart.runtime.assembly import Options, agree_on_plan, example_microbatch
from pipepart.runtime.batch_norm import check_batch_norm
from pipepart.runtime.device import limit_threads
from pipepart.runtime.launch import join_job, processes_on_this_host, world_size
from pipepart.runtime.mesh import Groups, fit_mesh
from pipepart.runtime.stage import StageRuntime
from pipepart.runtime.transport import check_transport
from pipepart.schedule import Timeline

__all__ = ["Pipeline"]


class Pipeline:
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

    `module_or_step` is a module whose forward returns the loss, or a bound method of a module that does. The example
    has the shapes of a whole batch. Under `torchrun` every rank makes the same calls; the batch of the first stage of
    each replica is the one that counts.
    """

    def __init__(
        self,
        module_or_step: nn.Module | Callable[..., Any],
        example_args: Sequence[Any] = (),
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        plan: Plan | None = None,
        stages: int | str = "auto",
        replicas: int | str = "auto",
        microbatches: int | str = "auto",
        schedule: str = "auto",
        chunks: int | str = "auto",
        slack: int | str = "auto",
        keep_together: Sequence[Sequence[str]] = (),
        split_at: Sequence[str] | None = None,
        timeout: float = 300.0,
        transport: str = "auto",
        recompute: bool | str = "auto",
        memory_limit: float | None = None,
        batch_norm: str = "microbatch",
    ) -> None:
        check_batch_norm(batch_norm)
        check_request(schedule, microbatches, stages, recompute)
        check_transport(transport)
        options = Options(
            stages=plan.stages if plan else stages,
            replicas=plan.replicas if plan else replicas,
            microbatches=microbatches,
            schedule=schedule,
            chunks=chunks,
            slack=slack,
            keep_together=keep_together,
            split_at=split_at,
            plan=plan,
            timeout=timeout,
            transport=transport,
            recompute=recompute,
            memory_limit=memory_limit,
            batch_norm=batch_norm,
        )
        self._device = join_job(timedelta(seconds=timeout))
        mesh = fit_mesh(world_size(), options.stages, options.replicas)
        example, usual = example_microbatch((tuple(example_args), dict(example_kwargs or {})), options, mesh)
        limit_threads(processes_on_this_host())
        groups = Groups.create(mesh, timedelta(seconds=timeout)) if mesh.world_size > 1 else None
        root = _root_of(module_or_step).to(self._device)
        was_training = root.training
        root.train()
        training = record(module_or_step, *example)
        agreed, graph, costs = agree_on_plan(training, training.flatten(*example), options, mesh, usual, groups)
        root.eval()
        evaluation = record(module_or_step, *example, like=training)
        root.train(was_training)
        self._runtime = StageRuntime(
            root, agreed, graph, training, groups, self._device, timeout, "step", transport, costs, batch_norm
        )
        self._runtime.add("evaluate", evaluation)
        self._trace = False
        self._accumulating = False

    @property
    def plan(self) -> Plan:
        return self._runtime.plan

    @property
    def module(self) -> nn.Module:
        """The user's module: the whole tree of names, with the parameters of other stages on the meta device."""
        return self._runtime.root

    @property
    def stage(self) -> int:
        return self._runtime.stage

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Replicas x stages as a `torch.distributed` mesh; None in a job of one process."""
        return self._runtime.groups.device_mesh if self._runtime.groups is not None else None

    # ---- running

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One training step: all micro-batches forward and backward. Gradients are added to `.grad` of the local parameters.

        Returns what the step returned, merged over the micro-batches: the loss and other scalars are means over the
        samples, on every rank; tensors with a batch dimension are put together on the last stage (None elsewhere).
        """
        self.module.train()
        leaves = self._leaves("step", args, kwargs)
        result = self._runtime.train(leaves, trace=self._trace, reduce=not self._accumulating)
        self._runtime.hand_over()
        return self._runtime.recording("step").unflatten(result.outputs)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Steps inside keep their gradients on this rank; the next step outside reduces all of them together.

        ```python
        with pipe.accumulate():
            pipe.step(first_half)
        pipe.step(second_half)  # now `.grad` has the sum of both, over all replicas
        ```
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """A forward in eval mode; the merged outputs are on every rank."""
        was_training = self.module.training
        self.module.eval()
        try:
            result = self._runtime.evaluate("evaluate", self._leaves("evaluate", args, kwargs))
        finally:
            self.module.train(was_training)
        return self._runtime.recording("evaluate").unflatten(result.outputs)

    def _leaves(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        if not self._runtime.is_first:
            return None
        recording: Recording = self._runtime.recording(name)
        leaves = recording.flatten(args, kwargs)
        return [leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def record_trace(self, on: bool = True) -> None:
        """Time every action of the following training steps; `trace` then has the last one."""
        self._trace = on

    @property
    def trace(self) -> Timeline:
        """The measured timeline of the last traced step, of all stages of this replica."""
        if self._runtime.timeline is None:
            raise PlanError("no step was traced: call record_trace() before step()")
        return self._runtime.timeline

    # ---- parameters

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this stage, for the optimizer of this rank."""
        return iter(self._runtime.named_parameters().values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their full names."""
        return iter(self._runtime.named_parameters().items())

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients by their norm over the whole model; returns that norm."""
        return self._runtime.clip_grad_norm(list(self.parameters()), max_norm)

    def state_dict(self) -> dict[str, Any]:
        """The whole model by full names on rank 0, empty elsewhere. Every rank must call it."""
        return self._runtime.full_state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Load this stage's part of a state dict of the whole model."""
        self._runtime.load_full_state_dict(state, strict)


def _root_of(module_or_step: nn.Module | Callable[..., Any]) -> nn.Module:
    root = module_or_step if isinstance(module_or_step, nn.Module) else getattr(module_or_step, "__self__", None)
    if not isinstance(root, nn.Module):
        raise PlanError(
            f"expected a module or a bound method of a module, got {type(module_or_step).__name__}. "
            "Put the step into a method of the module that holds the parameters."
        )
    return root
