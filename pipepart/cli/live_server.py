"""`pipepart view --live`: serves the page of a running job on loopback, to those who know its address, until the job ends.

The address has a random part, since every user of the host reaches its loopback interface. The server answers GET and HEAD for
three names, checks the header Host (a page of another site that lets its name point to 127.0.0.1 sends its own), and writes
nothing.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pipepart.cli.console import bold, shown
from pipepart.errors import ConfigError, PipepartError
from pipepart.planning.plan import Plan
from pipepart.report import load_graph, load_timeline
from pipepart.report.live_page import live_page
from pipepart.report.live_state import LIVE, LiveState, load_live
from pipepart.report.page import make_payload, render_page

__all__ = ["LiveServer", "serve_live", "still_runs"]

_HERE = "127.0.0.1"
_WAIT, _LAST = 60.0, 6.0
"""Seconds to wait for the first state of a job, and those in which its last one can be read."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """The server of one run. `address` is the address of its page."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.key = secrets.token_urlsafe(16)
        self.asked = 0.0
        """When a page last asked for the state."""
        super().__init__((_HERE, port), _Handler)
        self._report: tuple[Any, str] = None, ""
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://{_HERE}:{self.server_address[1]}/{self.key}/"

    def state(self) -> dict[str, Any]:
        self.asked = time.monotonic()
        found = load_live(self.folder)
        return {**asdict(found), "runs": still_runs(found), "report": self._version()}

    def _version(self) -> str | None:
        """A text that changes with the files of the report; None: there is no plan yet."""
        times = []
        for name in ("plan.json", "graph.json", "trace.json"):
            try:
                times.append(str((self.folder / name).stat().st_mtime_ns))
            except OSError:
                times.append("-")
        return None if times[0] == "-" else "-".join(times)

    def report(self) -> str:
        """The page of the plan with the newest trace. A trace that another plan has left is not shown."""
        with self._lock:
            version = self._version()
            if self._report[0] != version:
                self._report = version, self._rendered()
            return self._report[1]

    def _rendered(self) -> str:
        plan = Plan.load(self.folder / "plan.json")
        graph_file, trace = self.folder / "graph.json", self.folder / "trace.json"
        graph = load_graph(graph_file) if graph_file.is_file() else None
        measured = load_timeline(trace) if trace.is_file() else None
        if graph is not None and graph.name != plan.ops:
            graph = None
        if measured is not None and measured.stages != plan.stages:
            measured = None
        title = load_live(self.folder).title
        return render_page(make_payload(plan, title=title, graph=graph, measured=measured))


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "pipepart", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        names = {"": self._page, "state.json": self._state, "report.html": self._report}
        port = self.server.server_address[1]
        if self.headers.get("Host", "") not in (f"{_HERE}:{port}", f"localhost:{port}"):
            self._answer(403, b"", "text/plain")
            return
        parts = self.path.partition("?")[0].split("/")
        known = len(parts) == 3 and hmac.compare_digest(parts[1].encode(), self.server.key.encode())
        if not known or parts[2] not in names:
            self._answer(404, b"", "text/plain")
            return
        try:
            names[parts[2]]()
        except PipepartError as error:  # a file that is being replaced, or was removed
            self._answer(503, str(error).encode(), "text/plain; charset=utf-8")

    do_HEAD = do_GET

    def _page(self) -> None:
        text, policy = live_page(load_live(self.server.folder).title)
        self._answer(200, text.encode(), "text/html; charset=utf-8", policy)

    def _state(self) -> None:
        self._answer(200, json.dumps(self.server.state(), allow_nan=False).encode(), "application/json")

    def _report(self) -> None:
        self._answer(200, self.server.report().encode(), "text/html; charset=utf-8", "frame-ancestors 'self'")

    def _answer(self, status: int, body: bytes, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Security-Policy": policy, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Requests are not printed."""


def serve_live(source: str, port: int = 0) -> None:
    """Serve the page of the job whose folder is `source`, until the job has ended and its last state could be read."""
    folder = Path(source)
    _first_state(folder)
    try:
        server = LiveServer(folder, port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port}: {error}. Use another port, or 0 for any that is free") from error
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        thread.start()
        print(f"{bold('pipepart view')}  {shown(folder)} at {server.address}  (ends with the job)", flush=True)
        try:
            while still_runs(load_live(folder)):
                time.sleep(0.5)
            if time.monotonic() - server.asked < 2 * _LAST:  # a page is open, and asks for the last state
                time.sleep(_LAST)
        finally:
            server.shutdown()
            thread.join()
    print(f"the job has ended: {load_live(folder).ended or 'its process is gone'}", flush=True)


def still_runs(state: LiveState) -> bool:
    """Whether the job runs. A job on another host, which cannot be asked, runs until it says that it has ended."""
    if state.ended is not None:
        return False
    if state.host != socket.gethostname():
        return True
    try:
        os.kill(state.process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _first_state(folder: Path) -> LiveState:
    """Wait for a job that has only begun. Refuse a folder without a job, and a job that has ended."""
    if not folder.is_dir():
        raise ConfigError(f"--live: there is no folder {folder}; expected the output folder of a running job")
    deadline = time.monotonic() + _WAIT
    while not (folder / LIVE).is_file():
        if not (folder / "config.yaml").is_file() or time.monotonic() > deadline:
            raise ConfigError(
                f"--live: {folder} has no {LIVE}, which PipelineMonitor writes while a job runs (callbacks=default has it)"
            )
        time.sleep(0.2)
    state = load_live(folder)
    if not still_runs(state):
        raise ConfigError(f"--live: the job of {folder} has ended; `pipepart view {folder}` makes its report")
    return state
