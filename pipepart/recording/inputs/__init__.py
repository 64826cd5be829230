"""Inputs and results of a call: their leaves, and the leaves that hold samples.

The package knows containers, tensors and the dimension of the samples. It must not know modules or graphs.
"""
