"""Pipeline-parallel training for any PyTorch model, as one line in a Lightning Trainer."""

from pipepart.graph import Captured, OpGraph, capture
from pipepart.planning import Plan
from pipepart.runtime import Pipeline
from pipepart.strategy import PipelineStrategy

__version__ = "0.1.0"
__all__ = ["Captured", "OpGraph", "Pipeline", "PipelineStrategy", "Plan", "capture"]
