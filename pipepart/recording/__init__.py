"""Recording: a model or a whole step, run on an example and written down as a graph over its own parameters.

In the order of the data: `inputs` (containers as flat leaves), `model_state` (the Python state around a model), `trace`
(one recorded run), `generalise` (several runs become one graph), `proof` (the graph is held against the model) and
`execution` (the graph as a program, and its chunks). Knows modules and tensors. Knows nothing of devices, stages,
processes or Lightning.
"""

from pipepart.recording.execution.split import BATCH, Chunk, Edge, split
from pipepart.recording.proof.chunk_proof import prove_chunks
from pipepart.recording.proof.prove import prove
from pipepart.recording.record import record
from pipepart.recording.recording import ExtraOutput, GuardError, Input, OpMeta, Recording
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
    "prove",
    "prove_chunks",
    "record",
    "record_step",
    "split",
]
