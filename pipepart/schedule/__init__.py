"""Schedule: action lists as data. Pure functions generate them, a validator proves them, a simulator times them.

Knows stages, chunks, micro-batches and their times. Knows nothing of models, tensors or processes.
"""

from __future__ import annotations

from pipepart.schedule.actions import COMPUTE, Action, Edges, Message, Schedule, looped_placement, v_placement
from pipepart.schedule.chunk_times import ChunkCosts
from pipepart.schedule.comparison import Row, compare, format_table, picture, table
from pipepart.schedule.gantt import GANTT_LEGEND, gantt
from pipepart.schedule.registry import SCHEDULES, ScheduleKind, make_schedule
from pipepart.schedule.simulate import simulate, step_time
from pipepart.schedule.step_bounds import lower_bound
from pipepart.schedule.timeline import Event, Timeline
from pipepart.schedule.torch_csv import from_csv, read_csv, read_program, to_csv, write_csv, write_program
from pipepart.schedule.transfers import channels, pair_order, program
from pipepart.schedule.validate import Validated, peak_activations, validate, validate_program

__all__ = [
    "COMPUTE",
    "GANTT_LEGEND",
    "SCHEDULES",
    "Action",
    "ChunkCosts",
    "Edges",
    "Event",
    "Message",
    "Row",
    "Schedule",
    "ScheduleKind",
    "Timeline",
    "Validated",
    "channels",
    "compare",
    "format_table",
    "from_csv",
    "gantt",
    "looped_placement",
    "lower_bound",
    "make_schedule",
    "pair_order",
    "peak_activations",
    "picture",
    "program",
    "read_csv",
    "read_program",
    "simulate",
    "step_time",
    "table",
    "to_csv",
    "v_placement",
    "validate",
    "validate_program",
    "write_csv",
    "write_program",
]
