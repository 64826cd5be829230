"""Planning: the plan, how it is made, and how it is laid over other steps of the same model.

Knows graphs, costs, partitions and schedules, for a cluster that need not exist. Knows nothing of processes.
"""

from pipepart.planning.describe import describe, format_bytes, format_seconds
from pipepart.planning.entry import plan
from pipepart.planning.layout import Layout
from pipepart.planning.options import PlanOptions
from pipepart.planning.plan import ChunkPlan, Plan, StageMemory, Traffic
from pipepart.planning.planner import Request, auto_microbatches, check_request, make_plan
from pipepart.planning.transfer import transfer

__all__ = [
    "ChunkPlan",
    "Layout",
    "Plan",
    "PlanOptions",
    "Request",
    "StageMemory",
    "Traffic",
    "auto_microbatches",
    "check_request",
    "describe",
    "format_bytes",
    "format_seconds",
    "make_plan",
    "plan",
    "transfer",
]
