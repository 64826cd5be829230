"""Samples: how the outputs and gradients of micro-batches make up those of the whole batch.

Knows recordings and batches; knows nothing of devices, stages or processes.
"""

from pipepart.samples.weigh import BatchNumbers, Weighed, unweighed, weigh

__all__ = ["BatchNumbers", "Weighed", "unweighed", "weigh"]
