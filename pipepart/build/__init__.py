"""Build: the one path from a model and an example batch to a running stage.

It records on every rank, makes the plan on rank 0, checks that all ranks agree, proves the chunks, and makes the runtime.
The package knows processes and all packages from `recording` to `runtime`. It must not know Lightning.
"""

from pipepart.build.job import Example, Job, Recorded, Step, example_microbatch
from pipepart.build.path import Built, add_step, build, record_example

__all__ = ["Built", "Example", "Job", "Recorded", "Step", "add_step", "build", "example_microbatch", "record_example"]
