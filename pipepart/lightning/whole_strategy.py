"""The part of the strategy that cuts the module when a run starts and makes it whole again when the run has ended."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pipepart.errors import PipelineError
from pipepart.lightning.metrics import ConnectedMetrics
from pipepart.lightning.optimizers import states_to_host
from pipepart.lightning.recording_strategy import RecordingStrategy
from pipepart.lightning.run_patches import RunPatches
from pipepart.lightning.signals import Signals
from pipepart.runtime import StageRuntime

__all__ = ["WholeStrategy"]

_CUT = "_pipepart_cut"
"""The attribute of a module of which this process holds a part only: the runtime that can make it whole again."""


class _Cut:
    """Keeps the runtime with its module; copies and pickles of the module go without."""

    def __init__(self, runtime: StageRuntime | None = None) -> None:
        self.runtime = runtime

    def __reduce__(self) -> Any:
        return _Cut, ()


class WholeStrategy(RecordingStrategy):
    """Before, after and between runs: who has which values."""

    after = "whole"
    _metrics: ConnectedMetrics | None = None
    _signals: Signals | None = None
    _runs = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patches = RunPatches()

    def whole_parameters(self, gradients: bool = False) -> AbstractContextManager[None]:
        """Inside, every rank sees the values (and gradients) of all parameters and buffers. All ranks must enter together.

        ```python
        def on_train_batch_end(self, *args):
            with self.trainer.strategy.whole_parameters(), torch.no_grad():
                for target, online in zip(self.target.parameters(), self.online.parameters()):
                    target.lerp_(online, 0.01)
        ```

        What is written to a parameter inside holds on the stages that have it, so every rank must write the same.
        """
        return self.runtime.parts.gathered(gradients)

    # ---- a run starts

    def _enter(self, module: LightningModule, fitting: bool) -> None:
        """Go on with the cut of an earlier run of this module, if it still fits; otherwise there is no runtime after."""
        self._runs += 1
        left = module.__dict__.get(_CUT)
        if left is not None and left.runtime is not None and left.runtime is not self._runtime:  # of another trainer
            module.__dict__.pop(_CUT)
            left.runtime.parts.make_whole()
        runtime = self._runtime
        if runtime is None:
            return
        planned = runtime.root is module and (runtime.has("training_step") or not fitting)
        if not planned or (runtime.parts.whole and not runtime.parts.same_model):
            self.make_whole()
        elif self._groups is not None:
            if runtime.parts.whole:
                runtime.parts.cut_again()
                self.model_to_device()
            runtime.parts.unlock()
            self._is_cut(module, runtime)

    def _is_cut(self, module: LightningModule, runtime: StageRuntime) -> None:
        """The module is in parts from here on."""
        if self._metrics is not None:
            self._metrics.release()
        self._metrics = ConnectedMetrics(module, runtime)
        if self._groups is not None:
            module.__dict__[_CUT] = _Cut(runtime)

    def make_whole(self) -> None:
        """All values on every rank, and the plan forgotten. All ranks must call it together."""
        if self._metrics is not None:
            self._metrics.release()
        runtime, self._runtime, self._metrics = self._runtime, None, None
        if runtime is not None:
            runtime.root.__dict__.pop(_CUT, None)
            if not runtime.parts.whole:
                runtime.parts.make_whole()

    # ---- a run ends

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and self._signals is not None and self._runtime is not None:
            self._signals.save()
        self._vote(f"failed: {type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        """Not the base class's: that one moves the module to the CPU, which parameters of other stages cannot."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._patches.undo()
        self._leave()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _leave(self) -> None:
        """Make the module whole, as after a run on one device, unless the run failed or it is to stay in parts."""
        runtime, module = self._runtime, self.lightning_module
        if runtime is None or module is None or self._groups is None or runtime.parts.whole:
            return
        if module.trainer.state.status == TrainerStatus.INTERRUPTED:
            runtime.parts.lock("the run was interrupted")
        elif self._empty:
            runtime.parts.lock("it was built on the meta device")
        elif self.after == "parts":
            runtime.parts.lock("after='parts' was asked for")
        else:
            self._wait_for_all()
            runtime.parts.make_whole(torch.device("cpu"))
            if self._metrics is not None:
                self._metrics.rest()
            module.__dict__.pop(_CUT, None)
            _update_properties(module, device=torch.device("cpu"))
            states_to_host(self.optimizers)

    def _vote(self, text: str) -> None:
        """Leave a word for the other ranks on how this run has ended here. Nobody is waited for."""
        if self._groups is not None and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            store.set(f"pipepart/ended/{self._runs}/{self._groups.rank}", text)

    def _wait_for_all(self) -> None:
        """Until every rank has said that its run ended well. A rank that failed is not waited for: that is an error."""
        assert self._groups is not None
        self._vote("well")
        store = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + self._options.timeout
        for rank in range(self.mesh.world_size):
            key = f"pipepart/ended/{self._runs}/{rank}"
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise PipelineError(
                        f"rank {rank} has not ended its run within {self._options.timeout:.0f} s after rank "
                        f"{self._groups.rank}: it is stopped, stuck, or still at work (then a larger timeout helps)."
                    )
                time.sleep(0.002)
            answer = store.get(key).decode(errors="replace")
            if answer != "well":
                raise PipelineError(
                    f"the run has ended on rank {self._groups.rank}, but rank {rank} {answer}. The module stays in parts."
                )
