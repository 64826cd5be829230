"""Cost: the time and the memory of each op, and the devices and links of clusters.

::

    recording -> timing, profile -> cache ------+
    op graph, cluster, this_machine -> analytic +-> OpCosts -> planning
    file -> op_costs, given --------------------+

The package knows recordings, ops, devices and links. It must not know chunks, schedules or processes.
"""

from pipepart.cost.cache import profiled
from pipepart.cost.op_costs import OpCosts
from pipepart.cost.profile import profile
from pipepart.cost.timing import state_kept, whole_step

__all__ = ["OpCosts", "profile", "profiled", "state_kept", "whole_step"]
