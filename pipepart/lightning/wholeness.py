"""Wholeness of a module: it is cut into parts when a run starts, and made whole when the run has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pipepart.devices import move_module
from pipepart.errors import PipelineError
from pipepart.lightning.metrics import ConnectedMetrics
from pipepart.lightning.namespaces import of
from pipepart.lightning.optimizers import states_to_host
from pipepart.lightning.ranks import Ranks
from pipepart.runtime import StageRuntime
from pipepart.runtime.silence import answer_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["Wholeness", "move_to_device"]

_CUT = "_pipepart_cut"
"""Attribute of a module of which this process holds only a part: the runtime that can make it whole."""
_ANSWER = 5.0  # seconds in which the store must answer


class _InParts:
    """Holds the runtime of a module in parts. Copies and pickles of the module do not contain the runtime."""

    def __init__(self, runtime: StageRuntime | None = None) -> None:
        self.runtime = runtime

    def __reduce__(self) -> Any:
        return _InParts, ()


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Move a module. Tensors on the meta device stay there until they are filled; `Module.to` would raise for them."""
    move_module(module, device)
    of(module)._update_properties(module, device=device)


def _to_host(runtime: StageRuntime) -> None:
    """Gather all values on every rank in host memory, one after the other: a device may be too small for all of them."""
    runtime.parts.make_whole(torch.device("cpu"))
    of(runtime.root)._update_properties(runtime.root, device=torch.device("cpu"))


class Wholeness:
    """The state of a module before, between and after runs: cut by a runtime, whole, or locked in parts."""

    def __init__(self, ranks: Ranks, after: Callable[[], str]) -> None:
        """`after` returns the state of the module after a run, "whole" or "parts". It is called when a run ends."""
        self._ranks, self._after = ranks, after
        self.runtime: StageRuntime | None = None
        """The runtime that has cut the module; None if there is no plan."""
        self._metrics: ConnectedMetrics | None = None
        self._runs = 0

    @property
    def in_step(self) -> bool:
        """Whether the replicas have equal parameters now."""
        loose = self.runtime.parameters.loose if self.runtime is not None else None
        return loose is None or loose.in_step

    def enter(self, module: LightningModule, fitting: bool) -> None:
        """Start a run: keep the cut of an earlier run if it still fits. Otherwise the pipeline is not set up."""
        self._runs += 1
        left = module.__dict__.get(_CUT)
        if left is not None and left.runtime is not None and left.runtime is not self.runtime:  # of another trainer
            module.__dict__.pop(_CUT)
            _to_host(left.runtime)
        runtime = self.runtime
        if runtime is None:
            return
        planned = runtime.root is module and (runtime.has("training_step") or not fitting)
        if not planned or (runtime.parts.whole and not runtime.parts.same_model):
            self.make_whole()
        elif self._ranks.groups is not None:
            if runtime.parts.whole:
                runtime.parts.cut_again()
                move_to_device(module, self._ranks.device)
            runtime.parts.unlock()
            self.connect()

    def connect(self) -> None:
        """Connect the metrics of the module in parts, and mark the module."""
        assert self.runtime is not None
        if self._metrics is not None:
            self._metrics.release()
        self._metrics = ConnectedMetrics(self.runtime.root, self.runtime)
        if self._ranks.groups is not None:
            self.runtime.root.__dict__[_CUT] = _InParts(self.runtime)

    def decide(self, decision: bool) -> bool:
        """Whether the decision is true on all ranks, of which those that are not first stages always agree.

        With one replica, its first stage tells the others, and does not wait for them.
        """
        if self.runtime is None or self._ranks.mesh.replicas > 1:
            return self._ranks.decide(decision)
        return bool(self.runtime.told_by_first(decision))

    def make_whole(self) -> None:
        """Gather all values on every rank, in host memory, and forget the plan. All ranks must call it together."""
        if self._metrics is not None:
            self._metrics.release()
        runtime, self.runtime, self._metrics = self.runtime, None, None
        if runtime is not None:
            runtime.root.__dict__.pop(_CUT, None)
            if not runtime.parts.whole:
                _to_host(runtime)

    def leave(self, module: LightningModule, optimizers: Sequence[Optimizer], empty: bool) -> None:
        """End a run: make the module whole, as after a run on one device, or lock it in parts.

        A module that is `empty`, built on the meta device, stays in parts.
        """
        runtime = self.runtime
        if runtime is None or self._ranks.groups is None or runtime.parts.whole:
            return
        if module.trainer.state.status == "interrupted":
            runtime.parts.lock("the run was interrupted")
            return
        if empty or self._after() == "parts":
            runtime.parts.lock("it was built on the meta device" if empty else "after='parts' is set")
            return
        self._wait_for_all()
        _to_host(runtime)
        if self._metrics is not None:
            self._metrics.rest()
        module.__dict__.pop(_CUT, None)
        states_to_host(optimizers)

    def vote(self, text: str) -> None:
        """Tell the other ranks how the run has ended on this rank. The call does not wait for other ranks.

        The host of the store may be gone: that must not take the place of the error with which this rank ends.
        """
        if self._ranks.groups is not None and dist.is_initialized():
            key, store = self._key(self._ranks.groups.rank), _store()
            answer_of(lambda: store.set(key, text), _ANSWER)

    def _key(self, rank: int) -> str:
        assert self._ranks.groups is not None
        return f"pipepart/ended/{self._ranks.groups.number}/{self._runs}/{rank}"

    def _wait_for_all(self) -> None:
        """Wait until the run has ended without an error on every rank. If a rank has failed, raise an error at once."""
        assert self._ranks.groups is not None
        self.vote("well")
        own, timeout = self._ranks.groups.rank, self._ranks.timeout
        deadline = time.monotonic() + timeout
        for rank in range(self._ranks.mesh.world_size):
            while not _store().check([self._key(rank)]):
                if time.monotonic() > deadline:
                    raise PipelineError(
                        f"rank {rank} has not ended its run within {timeout:.0f} s after rank {own}: it is stopped, "
                        "stuck, or still computing. Look at its output first; if it is computing, set a larger timeout."
                    )
                time.sleep(0.002)
            answer = _store().get(self._key(rank)).decode(errors="replace")
            if answer != "well":
                raise PipelineError(
                    f"the run has ended on rank {own}, but rank {rank} {answer}. The module stays in parts: correct the error "
                    f"of rank {rank}, and run again."
                )


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
