"""Makes the classes of pipepart known to a package of Lightning, when the program has imported that package."""

from __future__ import annotations

from pipepart.lightning.binding import join_callbacks
from pipepart.lightning.checkpoint_files import SafeCheckpointIO
from pipepart.lightning.fabric_strategy import FabricMethods
from pipepart.lightning.namespaces import named
from pipepart.lightning.notebook import NotebookStrategy
from pipepart.lightning.pipeline_strategy import PipelineStrategy

__all__ = ["join"]

PipelineStrategy.for_fabric = (FabricMethods,)


def join(package: str) -> None:
    """Register the strategy by its name and as a class, the callbacks and the checkpoint plugin with an imported package."""
    namespace = named(package)
    if package == namespace.pytorch:
        strategies, registry = namespace.module("pytorch.strategies"), namespace.StrategyRegistry
        join_callbacks()
    else:
        namespace.CheckpointIO.register(SafeCheckpointIO)
        strategies = namespace.module("fabric.strategies")
        registry = strategies.STRATEGY_REGISTRY
    strategies.ParallelStrategy.register(PipelineStrategy)
    kinds = {PipelineStrategy: "Pipeline parallelism, everything chosen automatically"}
    if package == namespace.pytorch:
        kinds[NotebookStrategy] = "Pipeline parallelism in notebooks, with processes by fork"
    for kind, words in kinds.items():
        if kind.strategy_name not in registry:
            registry.register(kind.strategy_name, kind, description=words)
