"""Build: the one path from a model and an example batch to a running stage.

Records on every rank, makes the plan on rank 0, checks that all ranks agree, proves the chunks, rehearses, and makes the
runtime. Knows processes; knows nothing of Lightning.
"""

from pipepart.build.agreement import Example, agree_on_plan, example_microbatch, prove_laid

__all__ = ["Example", "agree_on_plan", "example_microbatch", "prove_laid"]
