"""Lightning: the strategy, registered under its name so that `Trainer(strategy="pipepart")` finds it."""

from lightning.pytorch.strategies import StrategyRegistry

from pipepart.strategy.ema import WeightEMA
from pipepart.strategy.materialise import materialise
from pipepart.strategy.monitor import PipelineMonitor
from pipepart.strategy.pipeline_strategy import PipelineStrategy

__all__ = ["PipelineMonitor", "PipelineStrategy", "WeightEMA", "materialise"]

if PipelineStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        PipelineStrategy.strategy_name,
        PipelineStrategy,
        description="Pipeline parallelism, everything chosen automatically",
    )
