"""Graph: a recording as plain data, for cost, partition and schedule.

Knows the ops of a recording and the tensors between them, by name and size. Knows nothing of costs, stages or processes.
"""

from pipepart.graph.captured import Captured, capture
from pipepart.graph.from_recording import op_graph
from pipepart.graph.opgraph import Op, OpGraph

__all__ = ["Captured", "Op", "OpGraph", "capture", "op_graph"]
