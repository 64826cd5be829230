"""The runtime: executes a plan on the processes of a job.

Knows processes, tensors and actions. Decides nothing and knows nothing of Lightning.
"""

from pipepart.runtime.mesh import Groups, Mesh, fit_mesh
from pipepart.runtime.stage import StageRuntime

__all__ = ["Groups", "Mesh", "StageRuntime", "fit_mesh"]
