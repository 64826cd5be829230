"""Proof of a recording and of its chunks: outputs, buffers and gradients are those of the model.

Knows recordings, the runs that they were made of, and autograd. Does not know plans, stages or micro-batches.
"""
