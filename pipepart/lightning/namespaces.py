"""The packages of Lightning: `lightning`, and `pytorch_lightning` with `lightning_fabric`. Their classes are different objects.

`of(thing)` is the namespace whose classes belong to a trainer, a module or a strategy. A namespace imports its packages at
the first use of a name, so a package that the user does not use is not imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__all__ = ["PACKAGES", "Namespace", "either", "loaded", "named", "of", "overridden", "package_of"]

_HOMES = {
    "fabric": ("Fabric",),
    "fabric.plugins": ("CheckpointIO", "TorchCheckpointIO"),
    "fabric.plugins.environments": ("ClusterEnvironment", "LightningEnvironment"),
    "fabric.utilities": ("move_data_to_device",),
    "fabric.utilities.device_dtype_mixin": ("_update_properties",),
    "fabric.utilities.distributed": ("_all_gather_ddp_if_available", "_init_dist_connection"),
    "fabric.utilities.rank_zero": ("rank_zero_only", "rank_zero_warn"),
    "fabric.utilities.seed": ("_collect_rng_states", "_set_rng_states"),
    "pytorch": ("Callback", "LightningDataModule", "LightningModule", "Trainer"),
    "pytorch.callbacks": ("BaseFinetuning", "ModelCheckpoint", "ModelSummary", "ProgressBar"),
    "pytorch.core.optimizer": ("LightningOptimizer", "_init_optimizers_and_lr_schedulers"),
    "pytorch.loggers": ("TensorBoardLogger", "WandbLogger"),
    "pytorch.plugins.io.wrapper": ("_WrappingCheckpointIO",),
    "pytorch.plugins.precision": ("DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision"),
    "pytorch.strategies": ("ParallelStrategy", "StrategyRegistry"),
    "pytorch.utilities._pytree": ("_tree_flatten",),
    "pytorch.utilities.exceptions": ("SIGTERMException",),
    "pytorch.utilities.model_helpers": ("is_overridden",),
    "pytorch.utilities.signature_utils": ("is_param_in_hook_signature",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


class Namespace:
    """The classes and functions of one namespace, as attributes. The table above says where they are."""

    def __init__(self, pytorch: str, fabric: str) -> None:
        self.pytorch, self.fabric = pytorch, fabric

    def __repr__(self) -> str:
        return f"Namespace({self.pytorch})"

    def module_of(self, home: str) -> str:
        """The full name of a module: ``module_of("pytorch.callbacks")`` is "lightning.pytorch.callbacks"."""
        package, _, rest = home.partition(".")
        return ".".join(part for part in (getattr(self, package), rest) if part)

    def module(self, home: str) -> Any:
        return import_module(self.module_of(home))

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"{name} is not in the table of names of {__name__}")
        value = getattr(self.module(_HOME_OF[name]), name)
        self.__dict__[name] = value
        return value


_NAMESPACES = (Namespace("lightning.pytorch", "lightning.fabric"), Namespace("pytorch_lightning", "lightning_fabric"))
PACKAGES = tuple(package for each in _NAMESPACES for package in (each.fabric, each.pytorch))
"""The packages that a program may import. Those with a Trainer come after those that they import."""


def named(package: str) -> Namespace:
    """The namespace that has this package."""
    return next(each for each in _NAMESPACES if package in (each.pytorch, each.fabric))


def package_of(thing: Any) -> str | None:
    """The package of Lightning that the class of a thing is from, or derives from first; None if there is none."""
    for kind in type(thing).__mro__:
        for package in PACKAGES:
            if kind.__module__ == package or kind.__module__.startswith(f"{package}."):
                return package
    return None


def of(thing: Any) -> Namespace:
    """The namespace of a trainer, a module, a strategy or another object whose class derives from one of Lightning."""
    package = package_of(thing)
    return loaded() if package is None else named(package)


def loaded() -> Namespace:
    """A namespace that the program has imported, for functions that are the same in both; `lightning` if there is none."""
    return next((each for each in _NAMESPACES if each.fabric in sys.modules), _NAMESPACES[0])


def either(name: str) -> tuple[Any, ...]:
    """The classes of this name in all imported namespaces, for `isinstance`."""
    modules = (sys.modules.get(each.module_of(_HOME_OF[name])) for each in _NAMESPACES)
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))


def overridden(hook: str, thing: Any, base: str) -> bool:
    """Whether the class of a module, a data module or a callback has its own version of a method of the class `base`."""
    own = of(thing)
    return bool(own.is_overridden(hook, thing, getattr(own, base)))
