"""Schedule: lists of actions as data, with their validation, their messages and their times.

::

    actions        Action, Message, Edges, Schedule: the data
       |
    torch_csv      schedules from and to files
    registry       make_schedule(): schedules by name, or from a file
    generators     gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, forward, by a fixed rule
    controlled_memory  v_half, v_min, dualpipe_v, likewise
    searched       zb_1p, zb_2p, by the times of the chunks
       |
    dependencies   ActionGraph: the actions that each action needs
    messages       messages_of(): SEND and RECV of each stage; checks of explicit messages
    validate       validate(): checks that a schedule can be executed
       |
    channel_rules     check_posts(): whether the posts and waits of all hosts end under the rules of NCCL
    channel_programs  check_channels(): the same for the posts that follow from a schedule and its messages
       |
    chunk_costs    ChunkCosts: times of the actions; lower_bound() of the step
    simulate       simulate(): schedule and costs to a timeline
    timeline       Timeline: events with start and end, predicted or measured; critical path
    comparison     gantt(), table(), picture(): timelines and schedules as text
    visits         visits_of(): the runs of actions of one chunk, and the parameters that each of them borrows

The package knows stages, chunks, micro-batches and their times. It must not know models, tensors or processes.
"""

from __future__ import annotations

from pipepart.schedule import controlled_memory, generators, searched  # noqa: F401 - these register the schedules
from pipepart.schedule.actions import COMPUTE, Action, Edges, Message, Schedule, looped_placement, v_placement
from pipepart.schedule.channel_programs import check_channels, receives_due
from pipepart.schedule.channel_rules import Stuck
from pipepart.schedule.chunk_costs import ChunkCosts, lower_bound
from pipepart.schedule.comparison import GANTT_LEGEND, Row, compare, format_table, gantt, picture, table
from pipepart.schedule.messages import Messages, messages_of
from pipepart.schedule.registry import SCHEDULES, ScheduleKind, make_schedule
from pipepart.schedule.simulate import simulate, step_time
from pipepart.schedule.timeline import Event, Timeline
from pipepart.schedule.torch_csv import from_csv, read_csv, read_program, to_csv, write_csv, write_program
from pipepart.schedule.validate import Validated, peak_activations, validate, validate_program
from pipepart.schedule.visits import Visit, visits_of

__all__ = [
    "COMPUTE",
    "GANTT_LEGEND",
    "SCHEDULES",
    "Action",
    "ChunkCosts",
    "Edges",
    "Event",
    "Message",
    "Messages",
    "Row",
    "Schedule",
    "ScheduleKind",
    "Stuck",
    "Timeline",
    "Validated",
    "Visit",
    "check_channels",
    "compare",
    "format_table",
    "from_csv",
    "gantt",
    "looped_placement",
    "lower_bound",
    "make_schedule",
    "messages_of",
    "peak_activations",
    "picture",
    "read_csv",
    "read_program",
    "receives_due",
    "simulate",
    "step_time",
    "table",
    "to_csv",
    "v_placement",
    "validate",
    "validate_program",
    "visits_of",
    "write_csv",
    "write_program",
]
