"""Makes the classes of pipepart known to a package of Lightning, when the program has imported that package."""

from __future__ import annotations

from pipepart.lightning.binding import join_callbacks
from pipepart.lightning.checkpoint_files import SafeCheckpointIO
from pipepart.lightning.namespaces import named
from pipepart.lightning.pipeline_strategy import PipelineStrategy

__all__ = ["join"]


def join(package: str) -> None:
    """Register the strategy by its name and as a class, the callbacks and the checkpoint plugin with an imported package."""
    namespace = named(package)
    namespace.CheckpointIO.register(SafeCheckpointIO)
    if package != namespace.pytorch:
        return
    namespace.ParallelStrategy.register(PipelineStrategy)
    join_callbacks()
    name, registry = PipelineStrategy.strategy_name, namespace.StrategyRegistry
    if name not in registry:
        registry.register(name, PipelineStrategy, description="Pipeline parallelism, everything chosen automatically")
