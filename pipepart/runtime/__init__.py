"""The runtime: executes a plan on the processes of a job.

It knows processes, tensors and actions. It does not know Lightning or the search for plans, and it makes no decisions.
"""

from pipepart.runtime.chunked_step import RecordedStep, StageInputs
from pipepart.runtime.mesh import Groups, Mesh, fit_mesh
from pipepart.runtime.program import StepRequest
from pipepart.runtime.stage import StageRuntime

__all__ = ["Groups", "Mesh", "RecordedStep", "StageInputs", "StageRuntime", "StepRequest", "fit_mesh"]
