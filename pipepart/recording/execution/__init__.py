"""Execution of recordings: runnable graphs, chunks, and the ops that must share a chunk.

The package knows recordings, torch.fx, and the devices that a caller gives. It must not know how a recording was made.
"""
