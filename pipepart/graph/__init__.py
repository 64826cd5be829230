"""Graph: a recording as plain data, for cost, partition and schedule.

The package knows the ops of a recording and the tensors between them, by name and size. It must not know costs, stages
or processes.
"""

from pipepart.graph.captured import Captured, capture
from pipepart.graph.heads import Head, find_heads, is_size, keeps_numbers, sizes_of
from pipepart.graph.opgraph import HeadOps, Op, OpGraph, op_graph

__all__ = [
    "Captured",
    "Head",
    "HeadOps",
    "Op",
    "OpGraph",
    "capture",
    "find_heads",
    "is_size",
    "keeps_numbers",
    "op_graph",
    "sizes_of",
]
