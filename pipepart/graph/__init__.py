"""Graph: a recording as plain data, for cost, partition and schedule.

The package knows the ops of a recording and the tensors between them, by name and size. It must not know costs, stages
or processes.
"""

from pipepart.graph.captured import Captured, capture
from pipepart.graph.opgraph import Op, OpGraph, op_graph

__all__ = ["Captured", "Op", "OpGraph", "capture", "op_graph"]
