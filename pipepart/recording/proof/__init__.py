"""Proof of a recording and of its chunks: outputs, buffers and gradients are those of the model.

The package knows recordings, the runs that they were made of, and autograd. It must not know plans, stages or
micro-batches.
"""
