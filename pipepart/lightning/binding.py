"""Classes of pipepart that belong to the namespace of the user's trainer, although they are made before the trainer is.

A strategy is bound when a trainer connects it: it gets a class that derives from its own class and from the strategies of
the namespace of that trainer. Until then it counts as a strategy of each namespace (`abc.ABCMeta.register`).
"""

from __future__ import annotations

import sys
from functools import cache
from types import new_class
from typing import TYPE_CHECKING, Any, ClassVar

from pipepart.lightning.namespaces import Namespace, either, loaded, of

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:

    class Callback:
        """The base of our callbacks while no namespace is imported."""


__all__ = ["BoundStrategy", "OwnCallback", "join_callbacks", "kind_in"]


@cache
def kind_in(own: type, *bases: type, before: tuple[type, ...] = ()) -> type:
    """The class `own` with further bases, after it and `before` it, under its own name. It is made once for the same bases."""
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return new_class(own.__name__, (*before, own, *bases), exec_body=lambda body: body.update(names))


def _blank(own: type, bases: tuple[type, ...], before: tuple[type, ...]) -> Any:
    return object.__new__(kind_in(own, *bases, before=before) if bases else own)


class BoundStrategy:
    """The part of a strategy that binds it to the namespace of a Trainer or of Fabric.

    A Trainer sets `precision_plugin` when it connects the strategy, and Fabric sets `precision`. The plugin is of their own
    namespace.
    """

    for_fabric: ClassVar[tuple[type, ...]] = ()
    """The class with the methods that Fabric calls."""
    pipepart_own: type
    """The class without the bases of a namespace."""

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self.pipepart_own = type(self)
        self._accelerator, self._checkpoint_io, self._precision_plugin = accelerator, checkpoint_io, precision_plugin
        self.parallel_devices, self.cluster_environment = parallel_devices, cluster_environment
        likely = loaded() if precision_plugin is None else of(precision_plugin)
        if likely.pytorch in sys.modules:  # otherwise nobody can connect it yet, or only Fabric
            self._bind(likely)

    def _bind(self, namespace: Namespace, fabric: bool = False) -> None:
        """Belong to a namespace. Attributes of the base class are made anew, those that the user has given are kept."""
        base = namespace.module("fabric.strategies" if fabric else "pytorch.strategies").ParallelStrategy
        if base in type(self).__mro__:
            return
        given = self.parallel_devices, self.cluster_environment, self._checkpoint_io, self._precision_plugin
        self.__class__ = kind_in(self.pipepart_own, base, before=self.for_fabric if fabric else ())  # type: ignore[assignment]
        base.__init__(self, self._accelerator, *given)
        if fabric:
            self.begin_fabric()  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        bases = type(self).__bases__ if type(self) is not self.pipepart_own else (self.pipepart_own,)
        place = bases.index(self.pipepart_own)
        return _blank, (self.pipepart_own, bases[place + 1 :], bases[:place]), vars(self)

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin if self._precision_plugin is not None else of(self).Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            self._bind(of(plugin))
        self._precision_plugin = plugin

    @property
    def precision(self) -> Any:
        """The plugin, under Fabric."""
        plugin = self._precision_plugin
        return plugin if plugin is not None else of(self).module("fabric.plugins.precision").Precision()

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            self._bind(of(plugin), fabric=True)
        self._precision_plugin = plugin

    @property
    def _precision(self) -> Any:
        return self._precision_plugin

    @_precision.setter
    def _precision(self, plugin: Any) -> None:
        self._precision_plugin = plugin


class OwnCallback(Callback):
    """A callback of each namespace that the program has imported."""


def join_callbacks() -> None:
    """Let `OwnCallback` derive from the callbacks of all imported namespaces. Their methods do nothing."""
    OwnCallback.__bases__ = either("Callback") or OwnCallback.__bases__
