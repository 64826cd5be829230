"""`pipepart view`: a plan, a traced step or a run folder as a page, a picture, a trace for Perfetto, or text."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pipepart.cli.console import shown

__all__ = ["view_files"]


def view_files(
    source: str,
    output: str | None = None,
    *,
    compare: str | None = None,
    title: str | None = None,
    svg: str | None = None,
    perfetto: str | None = None,
    theme: str = "light",
    text: bool = False,
) -> list[Path]:
    """Write the requested files and print their paths. With `text` alone no file is written."""
    from pipepart.planning.plan import Plan
    from pipepart.report import load_timeline, plan_text, view, write_perfetto, write_svg
    from pipepart.report.account import load_account
    from pipepart.report.run_folder import locate

    found = locate(source)
    plan = Plan.load(found.plan)
    measured = load_timeline(found.trace) if found.trace else None
    made: list[Path] = []
    if text:
        account = load_account(found.account) if found.account else None
        width, color = shutil.get_terminal_size().columns, sys.stdout.isatty()
        print(plan_text(plan, measured, width, color=color, account=account))
    if output is not None or compare is not None or not (text or svg or perfetto):
        made.append(view(source, output, compare=compare, title=title))
    if svg:
        made.append(write_svg(svg, plan, measured=measured, theme=theme, title=title or ""))
    if perfetto:
        made.append(write_perfetto(perfetto, plan.timeline, measured=measured, title=title or "pipepart"))
    for path in made:
        print(shown(path))
    return made
