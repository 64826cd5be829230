"""Replaced attributes of Lightning's classes and objects: they are in place during a run, and `undo` restores them.

Here are those of fine-tuning callbacks, model summaries and signal handlers; `loss_scaling` has those of the loss scaler.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from pipepart.lightning.announce import tell
from pipepart.lightning.namespaces import of
from pipepart.recording.model_state.state import stand_ins
from pipepart.runtime import Groups
from pipepart.runtime.failure import guarded
from pipepart.runtime.meeting import reduce_later

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["RunPatches", "Signals", "connect_callbacks"]

_ABSENT = object()
_ANSWERS_WITHIN = 0.1
"""Seconds between two exchanges of flags, if steps are shorter than that."""
_IN_SERIES = 5
"""The factor of that time where exchanges may be under way: each of them wakes all ranks up, which have work to do."""
_MOST_CALLS = 16
"""Steps between two exchanges, at most: the next steps may take longer than the last ones."""


class RunPatches:
    """The attributes that one run has replaced."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a class or of an object. The attribute of an object may come from its class."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all attributes, the last replacement first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


# ---- callbacks


def connect_callbacks(trainer: Trainer, patches: RunPatches, gather: Callable[[Any], list[Any]]) -> None:
    """Let callbacks of Lightning work with parameters of other stages, which have no values.

    Fine-tuning callbacks compare parameters of several stages by their digests; ``gather(value)`` returns the values of all
    ranks. Model summaries run the forward on shapes alone.
    """
    own = of(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, own.BaseFinetuning):  # calls this method by the name of the class
            kind = own.BaseFinetuning
            filtered = partial(_not_in, kind.filter_on_optimizer, trainer, gather)
            patches.put(kind, "filter_on_optimizer", staticmethod(filtered))
        if isinstance(callback, own.ModelSummary):
            patches.put(callback, "_summary", partial(_summary, callback._summary))


def _not_in(
    original: Callable[..., list[Any]],
    trainer: Trainer,
    gather: Callable[[Any], list[Any]],
    optimizer: Optimizer,
    params: Iterable[torch.Tensor],
) -> list[Any]:
    """The parameters whose values no parameter of the optimizer has, by the `original`, which compares values.

    It is called for every optimizer of this process while a run goes on; for those of other trainers the original runs.
    """
    if all(own is not optimizer for own in trainer.optimizers):
        return original(optimizer, params)
    wanted = list(params)
    known = [p for group in optimizer.param_groups for p in group["params"]]
    found = gather([None if p.is_meta else _digest(p) for p in (*wanted, *known)])
    digests = [next((d for d in one if d is not None), str(index)) for index, one in enumerate(zip(*found))]
    numbers = {digest: torch.tensor(number) for number, digest in enumerate(dict.fromkeys(digests))}
    places = [numbers[digest].clone() for digest in digests]
    stand_in: Any = object.__new__(type(optimizer))
    stand_in.param_groups = [{"params": places[len(wanted) :]}]
    kept = {id(place) for place in original(stand_in, places[: len(wanted)])}
    return [p for p, place in zip(wanted, places) if id(place) in kept]


def _digest(parameter: torch.Tensor) -> str:
    """The digest of the values of a tensor, its shape and its type."""
    values = parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{tuple(parameter.shape)} {parameter.dtype} {hashlib.sha256(values.tobytes()).hexdigest()}"


def _summary(original: Callable[..., Any], trainer: Trainer, pl_module: LightningModule) -> Any:
    if pl_module.example_input_array is None:
        return original(trainer, pl_module)
    try:
        with stand_ins(pl_module, pl_module.device) as mode, mode:
            return original(trainer, pl_module)
    except Exception as error:  # some forwards need values
        reason = (str(error).strip().splitlines() or [""])[0][:160]
        tell(
            "pipepart: the model summary shows no sizes: no rank holds the whole model, and on shapes alone the forward "
            f"fails with {type(error).__name__}: {reason}"
        )
        example = pl_module.example_input_array
        pl_module.example_input_array = None
        try:
            return original(trainer, pl_module)
        finally:
            pl_module.example_input_array = example


# ---- signals


class Signals:
    """SIGTERM and requeue signals: all ranks finish the step, save, and leave together, whichever ranks received them.

    Lightning communicates from inside its signal handler. A rank of a pipeline may be waiting for another stage at that
    moment, so here a handler only sets a flag, and the ranks exchange their flags between steps.
    """

    def __init__(
        self, trainer: Trainer, groups: Groups | None, patches: RunPatches, in_step: Callable[[], bool] = lambda: True
    ) -> None:
        """`in_step` returns whether the replicas have equal parameters now; otherwise they do not wait for each other."""
        self._trainer, self._groups, self._in_step = trainer, groups, in_step
        self._terminate = self._requeue = False
        self._kind, self._calls, self._next, self._since = "", 0, 1, time.perf_counter()
        self._open: deque[tuple[Callable[[], None], torch.Tensor, bool]] = deque()
        """Exchanges under way: the function that waits for their end, the flags, and whether the kind was the same before."""
        connector: Any = trainer._signal_connector
        self._save_and_requeue: Callable[[int, Any], None] = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
        patches.put(connector, "_sigterm_notifier_fn", self._on_sigterm)
        patches.put(connector, "_slurm_sigusr_handler_fn", self._on_requeue)
        patches.put(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._between_steps)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        if not self._terminate:
            launcher: Any = self._trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(number)
        self._terminate = True
        if self._groups is None:  # a single process
            self._trainer._signal_connector.received_sigterm = True

    def _on_requeue(self, number: int, frame: Any) -> None:
        if self._groups is None:
            self._save_and_requeue(number, frame)
        else:
            self._requeue = True

    def agree(self, kind: str, behind: int = 0) -> None:
        """Exchange the flags, if it is time to. Afterwards `trainer.received_sigterm` is the same on all ranks.

        All ranks must call it equally often. An exchange costs a fraction of a millisecond, as much as a short step. So with
        short steps of one `kind` it takes place only each few calls, whose number all ranks know from the last exchange.
        `behind`: the exchanges that may be under way, so that stages that are some batches ahead do not wait.
        """
        if self._groups is None or not self._in_step():
            return
        self._calls += 1
        if kind != self._kind or self._calls >= self._next:
            self._next = self._next if kind == self._kind else 1
            requeue, self._requeue = self._requeue, False
            mine = int(1e6 * (time.perf_counter() - self._since) / self._calls)
            with guarded(self._groups):
                flags = torch.tensor([self._terminate, requeue, mine])
                self._open.append((reduce_later(flags, self._groups, self._groups.world), flags, kind == self._kind))
            self._kind, self._calls, self._since = kind, 0, time.perf_counter()
        while len(self._open) > behind:
            self._answered(*self._open.popleft(), behind)

    def _answered(self, wait: Callable[[], None], flags: torch.Tensor, same_kind: bool, behind: int) -> None:
        """Act on the flags of all ranks."""
        with guarded(self._groups):
            wait()
        terminate, requeue, slowest = flags.tolist()
        # After a change of the kind, the time of a call is not known yet.
        within = _ANSWERS_WITHIN * (1 if behind == 0 else _IN_SERIES)
        self._next = min(_MOST_CALLS, max(1, int(1e6 * within / max(1, slowest)))) if same_kind else 1
        if requeue:
            self._save_and_requeue(0, None)
        if terminate:
            self._trainer._signal_connector.received_sigterm = True

    def _between_steps(self) -> None:
        self.agree("training_step")
        if self._trainer.received_sigterm:
            raise of(self._trainer).SIGTERMException

    def save(self) -> None:
        """Save a checkpoint of the last finished step beside the others. All ranks must call it together."""
        trainer = self._trainer
        callback: Any = trainer.checkpoint_callback
        if not isinstance(callback, of(trainer).ModelCheckpoint) or callback.dirpath is None:
            tell("pipepart: stopped by SIGTERM; nothing saved, since this run has no ModelCheckpoint")
            return
        name = f"sigterm-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
        path = os.path.join(callback.dirpath, name)  # the folder may be an address
        trainer.save_checkpoint(path)
        tell(f"pipepart: stopped by SIGTERM after step {trainer.global_step}; saved {path}")
