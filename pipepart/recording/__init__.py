"""Recording: a model or a whole step is run on an example and becomes a graph over its own parameters.

In the order of the data: `inputs` (containers as flat leaves), `model_state` (the Python state around a model),
`recorded_run` (one run, op by op), `fallbacks` and `record` (runs until one succeeds), `generalise` (several runs become
one graph), `proof` (the graph is compared with the model) and `execution` (the graph as a program, and its chunks). `op`
is the description of an op that all of them share. The package knows modules and tensors. It must not know devices,
stages or processes.
"""

from pipepart.recording.execution.split import BATCH, Chunk, Edge, split
from pipepart.recording.op import OpMeta, op_of
from pipepart.recording.proof.chunk_proof import prove_chunks
from pipepart.recording.proof.prove import prove
from pipepart.recording.record import record
from pipepart.recording.recorded import ExtraOutput, GuardError, Input, Recording
from pipepart.recording.step import record_step

__all__ = [
    "BATCH",
    "Chunk",
    "Edge",
    "ExtraOutput",
    "GuardError",
    "Input",
    "OpMeta",
    "Recording",
    "op_of",
    "prove",
    "prove_chunks",
    "record",
    "record_step",
    "split",
]
