"""Lightning: the strategy, its callbacks and its checkpoints. `Trainer(strategy="pipepart")` finds the registered strategy.

The package knows Trainer and LightningModule; it has all code that uses the internals of Lightning. `build` makes the plan
and `runtime` executes it: this package must not know how.
"""

from pipepart.lightning.ema import WeightEMA
from pipepart.lightning.materialise import materialise
from pipepart.lightning.monitor import PipelineMonitor
from pipepart.lightning.notebook import NotebookStrategy
from pipepart.lightning.pipeline_strategy import PipelineStrategy
from pipepart.lightning.registration import join
from pipepart.lightning.safetensors_weights import SafetensorsWeights
from pipepart.lightning.sharded import consolidate
from pipepart.lightning.weights_folder import save_weights

__all__ = [
    "NotebookStrategy",
    "PipelineMonitor",
    "PipelineStrategy",
    "SafetensorsWeights",
    "WeightEMA",
    "consolidate",
    "join",
    "materialise",
    "save_weights",
]
