"""Build: the one path from a model and an example batch to a running stage.

Records on every rank, makes the plan on rank 0, checks that all ranks agree, proves the chunks, rehearses, and makes the
runtime. Knows processes; knows nothing of Lightning.
"""

from pipepart.build.agreement import Example, example_microbatch
from pipepart.build.path import Built, Job, Recorded, Step, add_step, build, record_example

__all__ = ["Built", "Example", "Job", "Recorded", "Step", "add_step", "build", "example_microbatch", "record_example"]
