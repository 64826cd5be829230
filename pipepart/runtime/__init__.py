"""The runtime: executes a plan on the processes of a job."""

from pipepart.runtime.assembly import Example, agree_on_plan, example_microbatch, prove_laid
from pipepart.runtime.mesh import Groups, Mesh, fit_mesh
from pipepart.runtime.options import Options
from pipepart.runtime.pipeline import Pipeline
from pipepart.runtime.stage import StageRuntime

__all__ = [
    "Example",
    "Groups",
    "Mesh",
    "Options",
    "Pipeline",
    "StageRuntime",
    "agree_on_plan",
    "example_microbatch",
    "fit_mesh",
    "prove_laid",
]
