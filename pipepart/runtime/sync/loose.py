"""Replicas that make updates of their own: their parameters differ between exchanges.

A mode of this kind is told before and after each step of an optimizer. What it exchanges, and when, is its own. To evaluate, to
write a checkpoint and at the end of training there is one set of parameters: the mean over the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.runtime.sync.replica_sums import summed

__all__ = ["LooseReplicas"]


class LooseReplicas:
    """The copies of one stage in all replicas, each with parameters of its own."""

    mode: str
    """The name of the mode."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: int,
        named: Callable[..., Mapping[str, nn.Parameter]],
        tied: Collection[str] = (),
    ) -> None:
        """`group`: the copies of this stage; `named` returns the parameters of this stage by name, or with True all of them.

        `tied`: the parameters of which other stages have copies.
        """
        self.group, self.replicas, self._named, self._tied = group, replicas, named, frozenset(tied)
        self.own_groups: list[dist.ProcessGroup] = []
        """The process groups that this mode has made."""
        self._aside: dict[str, torch.Tensor] | None = None
        """The parameters of this replica while those shown are the mean; None: this replica has its own."""

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this stage that are trained, by name. The replicas have equal ones."""
        return {name: p for name, p in self._named().items() if p.requires_grad}

    def _of(self, parameters: Iterable[torch.Tensor]) -> dict[str, nn.Parameter]:
        """Return those of `parameters` that this stage trains, by name."""
        wanted = {id(p) for p in parameters}
        return {name: p for name, p in self.trained().items() if id(p) in wanted}

    # ---- the mean

    @property
    def shows_mean(self) -> bool:
        """Whether the parameters have the mean now."""
        return self._aside is not None

    @torch.no_grad()
    def show_mean(self) -> None:
        """Put the mean of the replicas into the parameters, until `hide_mean`. All replicas must call it."""
        if self._aside is not None or self.in_step:
            return
        self._aside = {name: p.detach().clone() for name, p in self.trained().items()}
        self._take_mean(self.trained())

    @torch.no_grad()
    def hide_mean(self) -> None:
        """Put the parameters of this replica back."""
        aside, self._aside = self._aside, None
        named = self._named()
        for name, values in (aside or {}).items():
            named[name].copy_(values)

    def settle(self) -> None:
        """Prepare for a point at which replicas wait for each other. All replicas must call it."""

    @torch.no_grad()
    def average(self) -> None:
        """Replace the parameters of all replicas by their mean, and begin anew. All replicas must call it."""
        self.hide_mean()
        if not self.in_step:
            self._take_mean(self.trained())
        self.begin_anew()

    def _take_mean(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, total in self._summed(parameters):
            parameters[name].copy_(total.div_(self.replicas))

    def _summed(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the sum of each tensor over the replicas, by name. Sums of tied parameters are equal on all their stages."""
        names = list(tensors)
        alone = {place for place, name in enumerate(names) if name in self._tied}
        for place, total in summed(list(tensors.values()), self.group, alone):
            yield names[place], total

    @property
    def own_values(self) -> dict[str, torch.Tensor]:
        """The parameters of this replica by name, also while the mean is shown."""
        return self._aside if self._aside is not None else {n: p.detach() for n, p in self.trained().items()}

    # ---- what a mode decides

    @property
    def staleness(self) -> Mapping[int, int]:
        """For each number of updates between two visits of a token, how often it was seen; empty without a token."""
        return {}

    @property
    def summary(self) -> str:
        """Lines on the exchanges of this run, for its end; empty if there is nothing to say."""
        return ""

    @property
    def in_step(self) -> bool:
        """Whether the replicas have equal parameters now. All of them find the same, and all stages of a Trainer do."""
        raise NotImplementedError

    def before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that an optimizer is about to change `parameters`."""

    def after_update(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that an optimizer has changed `parameters`. All replicas must call it."""
        raise NotImplementedError

    def begin_anew(self) -> None:
        """Forget all earlier exchanges: the replicas have equal parameters."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what all replicas know of their exchanges: of the parameters of this stage, by name."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which may have entries of other stages."""
        raise NotImplementedError
