"""Cost: the time and the memory of each op, measured, computed or read from a file.

Knows ops and devices. Knows nothing of chunks, schedules or processes.
"""

from pipepart.cost.cache import profiled
from pipepart.cost.op_costs import OpCosts
from pipepart.cost.profile import profile
from pipepart.cost.timing import state_kept, whole_step

__all__ = ["OpCosts", "profile", "profiled", "state_kept", "whole_step"]
