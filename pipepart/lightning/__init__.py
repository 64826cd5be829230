"""Lightning: the strategy, registered under its name so that `Trainer(strategy="pipepart")` finds it.

All that touches Lightning is here. It speaks Lightning and delegates: planning is done by `build`, training by `runtime`.
"""

from lightning.pytorch.strategies import StrategyRegistry

from pipepart.lightning.ema import WeightEMA
from pipepart.lightning.materialise import materialise
from pipepart.lightning.monitor import PipelineMonitor
from pipepart.lightning.pipeline_strategy import PipelineStrategy
from pipepart.lightning.sharded import consolidate

__all__ = ["PipelineMonitor", "PipelineStrategy", "WeightEMA", "consolidate", "materialise"]

if PipelineStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        PipelineStrategy.strategy_name,
        PipelineStrategy,
        description="Pipeline parallelism, everything chosen automatically",
    )
