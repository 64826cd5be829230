"""The trainer as a recorded step sees it: values of one process, counters and learning rates as inputs of the graph.

A step may read whatever does not change what it computes. Its optimizers and schedulers can be read, and their numbers are
those of each step; they cannot be called. When the first step is recorded, the optimizers do not exist yet: it is then
recorded as if there were one of each, and once more if there are others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipepart.errors import CaptureError
from pipepart.recording.model_state.places import Attribute, Place, is_plain_value
from pipepart.recording.model_state.reads import active

__all__ = ["NeedsNumber", "TrainerView", "number_of_trainer"]

_OF_THE_RANK = {"is_global_zero": True, "global_rank": 0, "local_rank": 0, "node_rank": 0}
"""A step runs once over all stages, so it reads the values of a single process."""
_SHARED = ("world_size", "num_devices")
"""Numbers of processes. The stages of a replica are one process for the step, so these are numbers of replicas."""
_FLAGS = frozenset({"should_stop"})
"""Flags of the trainer that a step may set. They are set after each step."""
_NAME = re.compile(r"(optimizer|scheduler)(\d+)_group(\d+)_(\w+)")
_REMEDY = (
    "optimizers and schedulers are not part of a recorded step, which can only read their numbers (param_groups, "
    "get_last_lr()); return the loss and let the trainer optimize"
)


class NeedsNumber(CaptureError):
    """The step reads a number that is not an input of the graph yet."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__(f"the step reads {name}")
        self.name, self.value = name, value


def number_of_trainer(trainer: Any, name: str) -> float | None:
    """The present value of a number that `NeedsNumber` has named; None for other names, 0 if there is no such number yet."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    kind, which, group, key = match[1], int(match[2]), int(match[3]), match[4]
    try:
        if kind == "optimizer":
            value = trainer.optimizers[which].param_groups[group][key]
        else:
            value = trainer.lr_scheduler_configs[which].scheduler.get_last_lr()[group]
    except (AttributeError, IndexError, KeyError):
        return 0.0
    return float(value)


class TrainerView:
    """Replaces the trainer while a step is recorded: counters are inputs, other attributes are those of the trainer."""

    def __init__(
        self,
        trainer: Any,
        numbers: Mapping[str, Any],
        counters: tuple[str, ...],
        loggers: Sequence[Any] = (),
        show: Callable[..., None] | None = None,
        sets: Callable[[str, bool], None] | None = None,
    ) -> None:
        """`loggers` and `show` stand for the loggers and for `print` of the trainer. `sets` is called for flags of the trainer
        that the step may set (`should_stop`)."""
        own = {"_trainer": trainer, "_numbers": numbers, "_counters": counters}
        self.__dict__.update(own, _loggers=loggers, _show=show, _sets=sets)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return TrainerView if self._trainer is None else type(self._trainer)

    def __getattr__(self, name: str) -> Any:
        if name in self._counters:
            return self._numbers[name]
        if name == "optimizers":
            return _Several(self._count("optimizers"), self.optimizer)
        if name == "lr_scheduler_configs":
            return _Several(self._count("lr_scheduler_configs"), lambda i: _Config(self.scheduler(i)))
        if self._trainer is None:
            raise CaptureError(
                f"the step reads trainer.{name}, and the module has no trainer yet; attach one, or record inside fit"
            )
        if name in ("logger", "loggers"):
            return list(self._loggers) if name == "loggers" else next(iter(self._loggers), None)
        if name == "print" and self._show is not None:
            return self._show
        if name in _OF_THE_RANK:
            return _OF_THE_RANK[name]
        if name in _SHARED:
            mesh = _data_mesh(self._trainer.strategy)
            return 1 if mesh is None else mesh.replicas
        if name == "strategy":
            return _Strategy(self._trainer.strategy)
        reads = active()
        return getattr(self._trainer, name) if reads is None else reads.of_trainer(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FLAGS and isinstance(value, bool) and self._sets is not None:
            self._sets(name, value)
            self.__dict__[name] = value
            return
        raise CaptureError(
            f"the step sets trainer.{name}. A recorded step does not run this Python again, so the trainer would not change: "
            "set it in a hook."
        )

    def optimizers_of_module(self, use_pl_optimizer: bool = True) -> Any:
        """What ``self.optimizers()`` returns."""
        return self.__getattr__("optimizers").only()

    def lr_schedulers(self) -> Any:
        """What ``self.lr_schedulers()`` returns."""
        return _Several(self._count("lr_scheduler_configs"), self.scheduler).only()

    def optimizer(self, index: int) -> _Optimizer:
        def groups() -> _Several:
            count = self._count("optimizers", index)
            return _Several(
                count, lambda group: _Group(lambda key: self._number(f"optimizer{index}_group{group}_{key}"))
            )

        return _Optimizer(groups)

    def scheduler(self, index: int) -> _Scheduler:
        def rates() -> list[Any]:
            count = self._count("lr_scheduler_configs", index)
            return [self._number(f"scheduler{index}_group{group}_lr") for group in range(count)]

        return _Scheduler(rates)

    def _number(self, name: str) -> Any:
        if name not in self._numbers:
            value = number_of_trainer(self._trainer, name)
            raise NeedsNumber(name, 0.0 if value is None else value)
        return self._numbers[name]

    def _count(self, kind: str, index: int | None = None) -> int:
        """The number of optimizers or schedulers, or of the groups of one of them. A recording holds for this number."""
        owner = _Counts(self._trainer)
        key = (kind, index)
        count = owner.get(key)
        reads = active()
        if reads is not None:
            what = f"number of trainer.{kind}" if index is None else f"number of groups of trainer.{kind}[{index}]"
            reads.depends(Place(what, owner, key), count)
        return count


class _Counts:
    """The numbers of optimizers, schedulers and groups; 1 each, as long as there are no optimizers."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def get(self, key: Any, default: Any = None, /) -> Any:
        kind, index = key
        if self.trainer is None or not self.trainer.optimizers:
            return 1
        found = getattr(self.trainer, kind)
        if index is None:
            return len(found)
        if index >= len(found):
            return 0
        return len((found[index] if kind == "optimizers" else found[index].scheduler.optimizer).param_groups)


class _Several:
    """A sequence of views."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not -self._count <= index < self._count:
            raise IndexError("list index out of range")
        return self._make(index % self._count)

    def __iter__(self) -> Iterator[Any]:
        return iter([self._make(index) for index in range(self._count)])

    def only(self) -> Any:
        """As methods of a LightningModule return them: nothing, the only one, or all."""
        return None if not self._count else self[0] if self._count == 1 else list(self)


class _ReadOnly:
    """A part of an optimizer or a scheduler that can only be read."""

    _what = "an optimizer"

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"the step uses {name!r} of {self._what}: {_REMEDY}.")


class _Optimizer(_ReadOnly):
    def __init__(self, groups: Callable[[], _Several]) -> None:
        self._groups = groups

    @property
    def param_groups(self) -> _Several:
        return self._groups()

    @property
    def optimizer(self) -> _Optimizer:
        return self


class _Group(_ReadOnly):
    _what = "a parameter group"

    def __init__(self, number: Callable[[str], Any]) -> None:
        self._number = number

    def __getitem__(self, key: str) -> Any:
        if key in ("params", "betas"):
            raise CaptureError(f"the step reads param_groups[...][{key!r}]: {_REMEDY}.")
        return self._number(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]


class _Scheduler(_ReadOnly):
    _what = "a scheduler"

    def __init__(self, rates: Callable[[], list[Any]]) -> None:
        self._rates = rates

    def get_last_lr(self) -> list[Any]:
        return self._rates()


class _Config(_ReadOnly):
    _what = "a scheduler"

    def __init__(self, scheduler: _Scheduler) -> None:
        self.scheduler = scheduler


class _Strategy:
    """The strategy of the trainer: its class and its plain attributes can be read."""

    def __init__(self, strategy: Any) -> None:
        self.__dict__.update(_strategy=strategy)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._strategy)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_RANK:
            return _OF_THE_RANK[name]
        if name in ("world_size", "num_processes"):
            mesh = _data_mesh(self._strategy)
            return 1 if mesh is None else mesh.replicas
        value = getattr(self._strategy, name)
        if callable(value):
            raise CaptureError(
                f"the step calls trainer.strategy.{name}. A recorded step does not run this Python again: call it in a hook."
            )
        reads = active()
        if reads is not None and is_plain_value(value):
            reads.depends(Place(f"trainer.strategy.{name}", Attribute(self._strategy), name), value)
        return value


def _data_mesh(strategy: Any) -> Any:
    """The mesh of the replicas that divide the data; None with strategies of others."""
    return getattr(strategy, "data_mesh", None) or getattr(strategy, "mesh", None)
