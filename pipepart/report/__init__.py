"""Report: pages, traces, pictures and tables of plans and of measured steps.

Reads plans and timelines. Knows nothing of the runtime and of Lightning.
"""

from __future__ import annotations

from pipepart.report.files import view, write_report
from pipepart.report.graph_view import GraphView, load_graph, save_graph
from pipepart.report.perfetto import check_trace, write_perfetto
from pipepart.report.svg import static_svg, write_svg
from pipepart.report.text import gantt_text, plan_text
from pipepart.report.trace_file import load_timeline, save_timeline

__all__ = [
    "GraphView",
    "check_trace",
    "gantt_text",
    "load_graph",
    "load_timeline",
    "plan_text",
    "save_graph",
    "save_timeline",
    "static_svg",
    "view",
    "write_perfetto",
    "write_report",
    "write_svg",
]
