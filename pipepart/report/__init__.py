"""Report: pages, traces, pictures and tables of plans and of measured steps.

::

    plan, timelines, graph_view -> page (HTML), svg, text (terminal), perfetto (traces), figures (trackers)
    run_folder                  -> finds these files, writes pages

The package knows plans, timelines and graphs. It must not know processes or Lightning.
"""

from __future__ import annotations

from pipepart.report.graph_view import GraphView, load_graph, save_graph
from pipepart.report.perfetto import write_perfetto
from pipepart.report.run_folder import view, write_report
from pipepart.report.svg import static_svg, write_svg
from pipepart.report.text import gantt_text, plan_text
from pipepart.report.timelines import load_timeline, save_timeline

__all__ = [
    "GraphView",
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
