"""Lightning: the strategy, its callbacks and its checkpoints. `Trainer(strategy="pipepart")` finds the registered strategy.

Knows Trainer and LightningModule, and all code that touches the inside of Lightning is here. Planning is done by `build`,
training by `runtime`: this room must not know how a plan is made or executed.
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
