"""Steps of optimizers: whatever optimizer of torch a program makes, what replicas exchange follows its step."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["drop_states", "follow_optimizers"]


class _Updated(Protocol):
    def before_update(self, optimizer: Optimizer) -> None: ...

    def after_update(self, optimizer: Optimizer) -> None: ...


_newest: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_Updated]] = weakref.WeakKeyDictionary()
"""By model what was made last for it: a pipeline that was made for the same model before has other owners."""


def follow_optimizers(owner: _Updated, root: nn.Module, follows: bool) -> None:
    """Call ``owner.before_update`` and ``owner.after_update`` with each optimizer of torch around each of its steps.

    `follows`: whether replicas of `root` exchange anything then. It ends when `owner` is collected, or when there is another
    one for the same model.
    """
    reference = weakref.ref(owner)
    _newest[root] = reference
    if not follows:
        return

    def newest() -> _Updated | None:
        living = reference()
        return living if living is not None and any(one is reference for one in _newest.values()) else None

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = newest()
        if living is not None:
            living.before_update(optimizer)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = newest()
        if living is not None:
            living.after_update(optimizer)

    weakref.finalize(owner, register_optimizer_step_pre_hook(before).remove)
    weakref.finalize(owner, register_optimizer_step_post_hook(after).remove)


def drop_states(optimizer: Optimizer, parameters: Collection[int]) -> None:
    """Remove the states of parameters, by identity, that an optimizer has made before it knew their gradients (Adagrad).

    Optimizers of other libraries may need what they have made, and keep it.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        for parameter in [p for p in optimizer.state if id(p) in parameters]:
            del optimizer.state[parameter]
