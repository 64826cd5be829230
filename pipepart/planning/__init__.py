"""Planning: the search for a plan, the plan itself, and its transfer to other steps of the same model.

::

    request     options and request ------------+
    sources     costs of ops by micro-batch size +-> candidates    shapes and schedules, with estimates and bounds
    layout      devices and links of a mesh ----+        |
                                                         v
    pricing     costs of a split  <-------------------- splits     the best split for each (problems: for the partitioner)
      traffic, memory, chunks                            |
                                                         v
    plan        the plan and its file <-- finish <-- search       the best of all; entry: `plan` for users; head_choice: heads
    describe, transfer                                             read plans

The package knows op graphs, costs, partitions and schedules, for a cluster that need not exist. It must not know processes
or Lightning.
"""

from pipepart.planning.chunks import ChunkPlan, StageMemory, Traffic
from pipepart.planning.describe import describe, format_bytes, format_seconds
from pipepart.planning.entry import plan
from pipepart.planning.layout import Layout
from pipepart.planning.plan import Plan
from pipepart.planning.request import (
    MicrobatchCount,
    PlanOptions,
    PlanRequest,
    auto_microbatches,
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
    "describe",
    "format_bytes",
    "format_seconds",
    "neighbouring_counts",
    "plan",
    "search",
    "transfer",
]
