"""Inputs and results of a call: their leaves, and the leaves that hold samples.

Knows containers, tensors and the dimension of the samples. Does not know modules or graphs.
"""
