"""Samples: how the outputs and gradients of micro-batches make up those of the whole batch.

The package knows recordings and batches. It must not know devices, stages or processes.

```
follow        names of ops; values of a recording that follow the batch
   |
   |   the weights: a recording becomes a sum over micro-batches
   +-> quantities     numbers that come from the batch alone, such as counts of targets
   |   forms          outputs as trees of sums over samples and their denominators
   |   losses, terms  the walk from an output back to its form
   |   emission       forms written into the graph
   |   batch_numbers  the numbers of a batch or of a window, computed before a step
   |   weigh          all of it: Recording -> Weighed
   |
   |   the batch check: a recording runs on a batch and on its parts
   +-> laws           how the value of the whole follows from those of the parts
       lockstep       all ops on the batch and on its parts, side by side
       mixing         the ops that combine samples
       pieces         batches that are split as containers
       tail           the ops that run once per batch: Recording -> TailCut, Tail
       batch_check    all of it, and its messages
```
"""

from pipepart.samples.weigh import Weighed, unweighed, weigh

__all__ = ["Weighed", "unweighed", "weigh"]
