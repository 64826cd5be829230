"""Pipeline-parallel training for any PyTorch model, as one line in a Lightning Trainer.

Names are imported on first use, so that `import pipepart` is fast.
"""

from __future__ import annotations

import sys
from importlib import import_module, util
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pipepart.machine import limit_instructions

if TYPE_CHECKING:
    from pipepart.cost.cluster import Cluster, load_cluster
    from pipepart.errors import CaptureError, ConfigError, PipepartError, PlanError
    from pipepart.graph import Captured, capture
    from pipepart.lightning import NotebookStrategy, PipelineMonitor, PipelineStrategy, WeightEMA, consolidate
    from pipepart.pipeline import Pipeline
    from pipepart.planning import Plan, plan

__version__ = "0.1.0"
__all__ = [
    "CaptureError",
    "Captured",
    "Cluster",
    "ConfigError",
    "NotebookStrategy",
    "Pipeline",
    "PipelineMonitor",
    "PipelineStrategy",
    "PipepartError",
    "Plan",
    "PlanError",
    "WeightEMA",
    "capture",
    "consolidate",
    "load_cluster",
    "plan",
]

_HOMES = {
    "pipepart.cost.cluster": ("Cluster", "load_cluster"),
    "pipepart.errors": ("CaptureError", "ConfigError", "PipepartError", "PlanError"),
    "pipepart.graph": ("Captured", "capture"),
    "pipepart.lightning": ("NotebookStrategy", "PipelineMonitor", "PipelineStrategy", "WeightEMA", "consolidate"),
    "pipepart.pipeline": ("Pipeline",),
    "pipepart.planning": ("Plan", "plan"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'pipepart' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


_LIGHTNING = ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")
"""Packages of Lightning; a program may import any of them, before pipepart or after it."""


class _Register(MetaPathFinder):
    """Registers the strategy for `Trainer(strategy="pipepart")` when a package of Lightning is imported."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if fullname not in self._packages:
            return None
        self._packages.remove(fullname)
        spec = util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _join(fullname)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _join(package: str) -> None:
    import_module("pipepart.lightning").join(package)


limit_instructions()  # before torch chooses its instructions; has no effect unless the CPU has AMX
_imported = [package for package in _LIGHTNING if package in sys.modules]
sys.meta_path.insert(0, _Register(set(_LIGHTNING) - set(_imported)))
for _package in _imported:
    _join(_package)
