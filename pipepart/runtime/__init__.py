"""The runtime: executes a plan on the processes of a job."""

from pipepart.runtime.assembly import Options, agree_on_plan, example_microbatch
from pipepart.runtime.mesh import Groups, Mesh, fit_mesh
from pipepart.runtime.pipeline import Pipeline
from pipepart.runtime.stage import StageRuntime

__all__ = ["Groups", "Mesh", "Options", "Pipeline", "StageRuntime", "agree_on_plan", "example_microbatch", "fit_mesh"]
