"""Capture: run a model once and write down what it does, as a graph over its own parameters that can be cut."""

from pipepart.capture.chunk_proof import prove_chunks
from pipepart.capture.proof import prove
from pipepart.capture.record import record
from pipepart.capture.recording import GuardError, Input, LogCall, OpMeta, Recording
from pipepart.capture.split import BATCH, Chunk, Edge, split
from pipepart.capture.step import record_step

__all__ = [
    "BATCH",
    "Chunk",
    "Edge",
    "GuardError",
    "Input",
    "LogCall",
    "OpMeta",
    "Recording",
    "prove",
    "prove_chunks",
    "record",
    "record_step",
    "split",
]
