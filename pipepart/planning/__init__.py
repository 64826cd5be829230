"""Planning: the plan, how it is made, and how it is laid over other steps of the same model.

Knows graphs, costs, partitions and schedules, for a cluster that need not exist. Knows nothing of processes.
"""

from pipepart.planning.describe import describe, format_bytes, format_seconds
from pipepart.planning.entry import plan
from pipepart.planning.layout import Layout
from pipepart.planning.options import PlanOptions
from pipepart.planning.plan import ChunkPlan, Plan, StageMemory, Traffic
from pipepart.planning.request import (
    MicrobatchCount,
    PlanRequest,
    auto_microbatches,
    check_request,
    neighbouring_counts,
)
from pipepart.planning.search import search
from pipepart.planning.transfer import transfer

__all__ = [
    "ChunkPlan",
    "Layout",
    "MicrobatchCount",
    "Plan",
    "PlanOptions",
    "PlanRequest",
    "StageMemory",
    "Traffic",
    "auto_microbatches",
    "check_request",
    "describe",
    "format_bytes",
    "format_seconds",
    "neighbouring_counts",
    "plan",
    "search",
    "transfer",
]
