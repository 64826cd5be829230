"""Execution of recordings: runnable graphs, chunks, and the ops that must share a chunk.

Knows recordings and torch.fx. Does not know how a recording was made, and knows no devices but those it is given.
"""
