"""Capture: run a model once and write down what it does, as a graph over its own parameters that can be cut."""

from pipepart.recording.execution.split import BATCH, Chunk, Edge, split
from pipepart.recording.proof.chunk_proof import prove_chunks
from pipepart.recording.proof.prove import prove
from pipepart.recording.record import record
from pipepart.recording.recording import GuardError, Input, LogCall, OpMeta, Recording
from pipepart.recording.step import record_step

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
