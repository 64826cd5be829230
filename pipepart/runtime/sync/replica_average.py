"""The mode `local`: each replica trains alone for a round of updates, then all of them average their parameters.

```
replica 0   update update update ...  |        | update update ...
replica 1   update update update ...  | mean   | update update ...
            `every` updates           | (outer)| the next round
```

With an outer optimizer (DiLoCo, Douillard et al. 2023), the mean difference of a round is taken as a gradient: the parameters
at the beginning of the round make a step of SGD with Nesterov momentum along it. All replicas compute that step alike, from the
same sums, so they have equal parameters after it. Each replica keeps the states of its own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipepart.planning.sync_mode import SyncMode
from pipepart.runtime.sync.loose import LooseReplicas

__all__ = ["ReplicaAverage"]


class ReplicaAverage(LooseReplicas):
    """Averages the parameters of one stage over the replicas after each round."""

    mode = "local"

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: int,
        named: Callable[..., Mapping[str, nn.Parameter]],
        mode: SyncMode,
        tied: Collection[str] = (),
    ) -> None:
        super().__init__(group, replicas, named, tied)
        self._mode = mode
        self.updates: dict[str, int] = {}
        """The updates of each parameter in its round. Parameters of several optimizers may be in different places.

        Under a Trainer each rank has the optimizers of the whole model, so parameters of other stages are counted, too.
        """
        self._begin: dict[str, torch.Tensor] = {}
        """With an outer optimizer: the parameters at the beginning of the round."""
        self._momentum: dict[str, torch.Tensor] = {}

    @property
    def in_step(self) -> bool:
        return not any(self.updates.values())

    @torch.no_grad()
    def before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._mode.outer is not None:
            for name, parameter in self._of(parameters).items():
                if name not in self._begin:
                    self._begin[name] = parameter.detach().clone()

    @torch.no_grad()
    def after_update(self, parameters: Iterable[torch.Tensor]) -> None:
        wanted = {id(p) for p in parameters}
        changed = [name for name, p in self._named(True).items() if p.requires_grad and id(p) in wanted]
        for name in changed:
            self.updates[name] = self.updates.get(name, 0) + 1
        ended = [name for name in changed if self.updates[name] >= self._mode.every]
        held = self.trained() if ended else {}
        due = {name: held[name] for name in ended if name in held}
        if self._mode.outer is None:
            self._take_mean(due)
        else:
            self._outer_step(due)
        for name in ended:
            self.updates[name] = 0

    def _outer_step(self, due: Mapping[str, nn.Parameter]) -> None:
        lr, momentum = self._mode.outer_lr, self._mode.outer_momentum
        for name, total in self._summed(due):
            begin = self._begin[name]
            difference = begin - total.div_(self.replicas)
            kept = self._momentum.get(name)
            kept = difference.clone() if kept is None else kept.mul_(momentum).add_(difference)
            self._momentum[name] = kept
            begin.sub_(difference.add_(kept, alpha=momentum), alpha=lr)
            due[name].copy_(begin)

    def begin_anew(self) -> None:
        self.updates, self._begin, self._momentum = {}, {}, {}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": dict(self.updates), "begin": dict(self._begin), "momentum": dict(self._momentum)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own, known = self.trained(), self._named(True)
        self.updates = {name: int(count) for name, count in state.get("updates", {}).items() if name in known}
        self._begin, self._momentum = (
            {name: values.to(own[name], copy=True) for name, values in state.get(key, {}).items() if name in own}
            for key in ("begin", "momentum")
        )
