"""Pipeline-parallel training for any PyTorch model, as one line in a Lightning Trainer."""

from pipepart.cost.cluster import Cluster, load_cluster
from pipepart.graph import Captured, OpGraph, capture
from pipepart.planning import Plan, plan
from pipepart.runtime import Pipeline
from pipepart.strategy import PipelineStrategy

__version__ = "0.1.0"
__all__ = [
    "Captured",
    "Cluster",
    "OpGraph",
    "Pipeline",
    "PipelineStrategy",
    "Plan",
    "capture",
    "load_cluster",
    "plan",
]
