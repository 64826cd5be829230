"""The op graph of a captured model: pure data for cost, partition and schedule."""

from pipepart.graph.captured import Captured, capture
from pipepart.graph.from_recording import op_graph
from pipepart.graph.opgraph import Op, OpGraph

__all__ = ["Captured", "Op", "OpGraph", "capture", "op_graph"]
