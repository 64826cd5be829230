"""The parameters of a stage of which each replica keeps its share only, and borrows the others while it works (`fsdp`).

```
at rest          own: values                others: foreign, so that any use of their values is an error that names them
in a step        own: values                others: memory only while a visit to a chunk needs them   <--broadcast-- owner
evaluation       own: values                others: values
```

A parameter that is given back keeps its tensor, and the memory of the tensor has no bytes. So whatever autograd has saved for
the backward, the parameter or a view of it, has its values again as soon as they have come back, before the backward.

Transfers are collectives: all replicas must start the same ones in one order. So replicas compare what they are about to do
(`_agree`). If their steps differ (a smaller last batch has fewer micro-batches), all parameters come before the step. If one of
them needs all values at another point (it records a step again), the others send theirs and go on to compare.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, ParamSpec

import torch
from torch import nn

from pipepart.errors import ConfigError, PipelineError
from pipepart.runtime.foreign import ForeignTensor, Place, become, come_back
from pipepart.runtime.meeting import reduce_numbers
from pipepart.runtime.mesh import Groups
from pipepart.runtime.sync.parcels import Parcel, parcels_of
from pipepart.schedule import Visit, visits_of

__all__ = ["BorrowedParameters"]

_P = ParamSpec("_P")
_STEP, _ALL = 0, 1
"""What a replica is about to do: a step, or something that needs all values."""
_Reason = Literal["whole", "evaluation", "gradients"]
_TOGETHER = 2**20
"""Bytes up to which parameters travel together; a larger one travels from and into its own memory."""


def _outside_inference(method: Callable[_P, None]) -> Callable[_P, None]:
    """Run a method as in a training step: tensors that are made in the inference mode of an evaluation cannot be trained."""

    @functools.wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with torch.inference_mode(False), torch.no_grad():
            method(*args, **kwargs)

    return run


class BorrowedParameters:
    """The parameters of one stage. All replicas must call each method together, unless it says otherwise."""

    def __init__(
        self, groups: Groups, owners: Mapping[str, int], named: Callable[[], Mapping[str, nn.Parameter]], once: bool
    ) -> None:
        """`owners`: the replica that keeps each parameter; `named` returns the parameters of this stage by name.

        `once`: what was borrowed stays until its last use in the step; else until the end of the visit to its chunk.
        """
        assert groups.copies is not None
        self._groups, self._group, self._owners, self._named = groups, groups.copies, dict(owners), named
        self._ranks, self._once = groups.mesh.copies(groups.stage), once
        self._others = [name for name, owner in owners.items() if owner != groups.replica]
        self._away: dict[str, torch.Tensor] = {}
        """The tensors of foreign parameters, which have no memory; empty while the replica works."""
        self._storages: dict[str, tuple[torch.UntypedStorage, int]] = {}
        """The memory of each parameter of other replicas, and its bytes when it has values."""
        self._all_here = False
        self._shown: set[_Reason] = set()
        """Why all values stay here."""
        self._inside = 0
        """The contexts that hold all values here."""
        self._visits: deque[Visit] = deque()
        self._coming: deque[list[Parcel]] = deque()
        """The transfers that have set off, for one visit after the other."""
        self._lost: list[list[Parcel]] = []
        """Those of a step that has failed, whose memory is still written to."""
        _check(named())

    # ---- rest

    @_outside_inference
    def rest(self) -> None:
        """Give everything back: parameters of other replicas become foreign, unless they are shown. Needs no other replica."""
        if self.shown or self._inside or self._away:
            return
        named = self._named()
        for name in self._others:
            parameter = named[name]
            parameter.grad = None
            self._give_back(name, parameter)
            self._away[name] = become(parameter, self._place(name))
        self._all_here = False

    @_outside_inference
    def abandon(self) -> None:
        """Make parameters of other replicas foreign after a failure: transfers under way keep their memory."""
        if not self._away:
            named = self._named()
            self._away = {name: become(named[name], self._place(name)) for name in self._others}
        self._all_here = False
        self._visits.clear()
        self._lost = list(self._coming)
        self._coming.clear()

    def _place(self, name: str) -> Place:
        return Place(name, "parameter", self._groups.stage, self._ranks[self._owners[name]])

    def _wake(self) -> None:
        """Make parameters of other replicas plain ones again, without memory."""
        named, away = self._named(), self._away
        for name, other in away.items():
            come_back(named[name], other)
        self._away = {}

    def _give_back(self, name: str, parameter: nn.Parameter) -> None:
        """Let go of the memory of a parameter."""
        known, storage = self._storages.get(name), parameter.untyped_storage()
        if known is None or known[0]._cdata != storage._cdata:  # memory that others may use
            parameter.data = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self._groups.device
            )
            storage = parameter.untyped_storage()
            self._storages[name] = storage, storage.nbytes()
        storage.resize_(0)

    # ---- transfers

    def _borrow(self, names: Collection[str]) -> list[Parcel]:
        """Start the transfer of parameters from their owners, and give them memory here."""
        named, tensors = self._named(), []
        for name in names:
            if self._owners[name] != self._groups.replica:
                storage, size = self._storages[name]
                storage.resize_(size)
            tensors.append((named[name].data, self._owners[name]))
        parcels = parcels_of(tensors, _TOGETHER)
        for parcel in parcels:
            parcel.send(self._ranks[parcel.owner], self._group, parcel.owner == self._groups.replica)
        return parcels

    def _bring_all(self) -> None:
        for parcel in self._borrow(self._owners):
            parcel.arrive()
        self._all_here = True

    def _return(self, names: Collection[str]) -> None:
        for name in names:
            if self._owners[name] != self._groups.replica:
                self._storages[name][0].resize_(0)

    def _agree(self, purpose: int, digest: int = 0) -> bool:
        """Wait until all replicas have the same purpose, and return whether they have one digest."""
        while True:
            numbers = torch.tensor([purpose, digest, -digest])
            reduce_numbers(numbers, self._groups, self._groups.numbers)
            if int(numbers[0]) == purpose:
                return int(numbers[1]) == -int(numbers[2])
            self._bring_all()  # for another replica
            self._return(self._others)
            self._all_here = False

    # ---- all values

    @_outside_inference
    def _bring(self) -> None:
        if self._all_here:
            return
        self._wake()
        try:
            self._agree(_ALL)
            self._bring_all()
        except BaseException:
            self.abandon()
            raise

    def show(self, why: _Reason) -> None:
        """Hold all values here until `hide` is called for the same reason."""
        self._bring()
        self._shown.add(why)

    def hide(self, why: _Reason) -> None:
        """End what `show` has begun. Needs no other replica."""
        if why in self._shown:
            self._shown.remove(why)
            self.rest()

    @property
    def shown(self) -> bool:
        """Whether all values are held here for longer than a call."""
        return bool(self._shown)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Hold all values here inside."""
        self._bring()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self.rest()

    # ---- steps

    @_outside_inference
    def open(self) -> None:
        """Begin a step: parameters of other replicas become plain ones, whose values come later. Needs no other replica."""
        if self._inside or "whole" in self._shown:
            raise PipelineError(
                "a training step with sync='fsdp' has begun while every rank holds all parameters, and would change those of "
                "one replica only. End the context of whole_parameters() before the step."
            )
        self._shown.clear()  # an evaluation that has ended with an error
        self.rest()
        self._wake()

    @_outside_inference
    def begin(self, chunks: Sequence[int], names: Mapping[int, Sequence[str]]) -> None:
        """Begin the actions of a step, which have these `chunks`; `names`: the parameters of each chunk."""
        used = {chunk: set(own) for chunk, own in names.items()}
        order = {chunk: [name for name in self._owners if name in own] for chunk, own in used.items()}
        visits = visits_of(chunks, order, self._once)
        text = repr((list(chunks), [visit.borrowed for visit in visits]))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        if not self._agree(_STEP, digest):
            self._bring_all()
        elif visits:
            self._visits.extend(visits)
            self._coming.append(self._borrow(visits[0].borrowed))

    @_outside_inference
    def before(self, place: int) -> None:
        """Have the parameters for the action at this place, and let those of the next visit set off."""
        if not self._visits or self._visits[0].first != place:
            return
        for parcel in self._coming.popleft():
            parcel.arrive()
        if len(self._visits) > 1:
            self._coming.append(self._borrow(self._visits[1].borrowed))

    def after(self, place: int) -> None:
        """Give back what is not needed after the action at this place."""
        if self._visits and self._visits[0].last == place:
            self._return(self._visits.popleft().returned)


def _check(named: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters without values, and parameters that share memory: their values would be divided."""
    ranges = []
    for name, parameter in named.items():
        if parameter.is_meta or isinstance(parameter, ForeignTensor):
            raise ConfigError(
                f"sync='fsdp' divides the values of parameters, and {name!r} has none: the model was built on the meta device, "
                "or is too large for the device of one rank. Use sync='sharded', or build the model with values."
            )
        if parameter.numel():
            end = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride())) + 1
            first = parameter.data_ptr()
            ranges.append((first, first + end * parameter.element_size(), name))
    ranges.sort()
    for (_, end, name), (first, _, other) in itertools.pairwise(ranges):
        if first < end:
            raise ConfigError(
                f"parameters {name!r} and {other!r} share memory, and sync='fsdp' may keep them on different replicas. Tie "
                "them by one nn.Parameter object, or use sync='sharded'."
            )
