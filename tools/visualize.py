"""A page, a picture, a trace or a table of a plan, from a plan file, a trace file or a run folder.

python -m tools.visualize runs/last                              # report.html beside the plan
python -m tools.visualize plan.json --compare other.json -o both.html
python -m tools.visualize runs/last --svg plan.svg --perfetto trace.json --text
python -m tools.visualize runs/last --png page.png --width 400 --theme dark
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pipepart.cli.view import view_files
from pipepart.errors import PipepartError, PlanError
from pipepart.report.run_folder import locate


def chromium() -> str:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise PlanError("--png and --measure need a Chromium, and none is installed. Use --svg, or install chromium.")
    return browser


def take_picture(page: Path, target: Path, width: int, height: int, theme: str) -> None:
    """A PNG of a page, taken by a headless Chromium."""
    scheme = f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}"
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium(),
            "--headless=new",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            scheme,
        ]
        command += [f"--window-size={width},{height}", "--virtual-time-budget=3000", f"--screenshot={target}"]
        done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    if not target.is_file():
        raise PlanError(f"the browser made no picture: {done.stderr.strip()[-300:]}")


def measure(page: Path, width: int) -> str:
    """The times until a browser shows the first part of the page and all of it (needs playwright)."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise PlanError("--measure needs playwright: pip install playwright") from error
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": width, "height": 900})
        opened.goto(page.as_uri())
        opened.wait_for_selector("html[data-ready]")
        names = ["first-contentful-paint", "overview", "complete"]
        times = opened.evaluate("(names) => names.map((n) => performance.getEntriesByName(n)[0].startTime)", names)
        browser.close()
    paint, overview, complete = (f"{time:.0f} ms" for time in times)
    size = f"{page.stat().st_size / 1e6:.2f} MB"
    return f"first paint {paint}, overview with all its figures {overview}, complete {complete}, file {size}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.visualize", description="Show a plan, a trace or a run folder.")
    parser.add_argument("source", help="plan.json, trace.json or a run folder")
    parser.add_argument("-o", "--output", help="file of the page (default: report.html beside the plan)")
    parser.add_argument("--compare", help="a second plan, or its run folder")
    parser.add_argument("--title")
    parser.add_argument("--svg", help="also write the partition and its schedule as a standalone SVG")
    parser.add_argument("--perfetto", help="also write a trace for ui.perfetto.dev")
    parser.add_argument("--png", help="also take a picture of the page (needs Chromium)")
    parser.add_argument("--width", type=int, default=1400, help="of the picture, in pixels")
    parser.add_argument("--height", type=int, default=2600)
    parser.add_argument("--theme", choices=["light", "dark"], default="light")
    parser.add_argument("--measure", action="store_true", help="also time the page in a browser (needs playwright)")
    parser.add_argument("--text", action="store_true", help="also print table and chart to the terminal")
    given = parser.parse_args(arguments)
    try:
        page, *_ = view_files(
            given.source,
            given.output or str(locate(given.source).plan.parent / "report.html"),
            compare=given.compare,
            title=given.title,
            svg=given.svg,
            perfetto=given.perfetto,
            theme=given.theme,
            text=given.text,
        )
        if given.png:
            take_picture(page.resolve(), Path(given.png).resolve(), given.width, given.height, given.theme)
            print(given.png)
        if given.measure:
            print(measure(page.resolve(), given.width))
    except PipepartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
