"""The report of a self-test: lines in the terminal, and a JSON file that names no host, user, path or secret."""

from __future__ import annotations

import getpass
import json
import math
import os
import platform
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipepart.cli.console import bold
from pipepart.cli.selftest.verdicts import FAIL, OK, SKIPPED, Check
from pipepart.files import write_whole
from pipepart.secrets import clean
from pipepart.values import printable

__all__ = ["Report", "without_private"]

_PATH = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:'\",;()<>]+)+[/\\]?")
_SETTINGS = re.compile(r"(?:NCCL|TORCH_NCCL|GLOO|CUDA|HIP|OMP|MKL|ONEDNN)_\w+")
"""Environment variables that change how jobs run."""
_PLAIN = re.compile(r"[\w,=:^+-]{1,40}")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\[[0-9a-fA-F:]{3,}\]")
_WIDEST = 400  # characters of a text in the terminal
_LONGEST = 4000  # characters of a text in the file


def without_private(text: str) -> str:
    """Return a text without secrets, paths (the last part stays), addresses, and the names of the host and the user."""
    text = _ADDRESS.sub("ADDRESS", _PATH.sub(lambda found: re.split(r"[/\\]", found[0].rstrip("/\\"))[-1], clean(text)))
    names = {socket.gethostname(), socket.gethostname().split(".")[0], os.path.basename(os.path.expanduser("~"))}
    with suppress(Exception):  # a user without an entry in the system
        names.add(getpass.getuser())
    for name in sorted((name for name in names if len(name) > 1), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "NAME", text)
    return printable(text, keep="\n\t")[:_LONGEST]


class Report:
    """The checks of a self-test. Each is printed as soon as it is done."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def add(self, check: Check) -> None:
        """Add a check, and print its line."""
        self.checks.append(check)
        sign = {OK: bold("ok     "), FAIL: "FAIL   ", SKIPPED: "skipped"}[check.state]
        text = without_private(check.text)
        # The cause is the last line of a traceback, and the first one of any other text.
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        shown = lines[0] if "Traceback" not in text else f"{lines[0]} ... {lines[-1]}"
        print(f"{sign}  {check.subject:<12}  {check.name:<38}  {shown[:_WIDEST]}", flush=True)

    def count(self, state: str) -> int:
        """Return the number of checks with this state."""
        return sum(check.state == state for check in self.checks)

    def summary(self) -> str:
        """Return the last lines of the report: the counts, and the failed checks by name."""
        lines = [f"{self.count(OK)} ok, {self.count(FAIL)} failed, {self.count(SKIPPED)} skipped"]
        lines += [f"failed: {check.subject}, {check.name}" for check in self.checks if check.state == FAIL]
        return "\n".join(lines)

    def write(self, path: Path, more: Mapping[str, Any]) -> None:
        """Write everything to a JSON file."""
        data = {
            "format": 1,
            **_versions(),
            "settings": _settings(),
            **more,
            "counts": {state: self.count(state) for state in (OK, FAIL, SKIPPED)},
            "checks": [
                {
                    "subject": check.subject,
                    "name": check.name,
                    "state": check.state,
                    "text": check.text,
                    "seconds": round(check.seconds, 3),
                    **({"figures": check.figures} if check.figures else {}),
                }
                for check in self.checks
            ],
        }
        write_whole(path, json.dumps(_plain(data), indent=1) + "\n")


def _versions() -> dict[str, Any]:
    import torch

    from pipepart import __version__
    from pipepart.cost.this_machine import processor
    from pipepart.devices import build_of_torch
    from pipepart.machine import usable_cores

    built = build_of_torch()
    return {
        "pipepart": __version__,
        "torch": torch.__version__,
        "torch_built_for": built[0] if built else "cpu",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": usable_cores(),
    }


def _settings() -> dict[str, str]:
    """Return the environment variables that change how jobs run; values that are not plain words are left out."""
    found = {name: value for name, value in sorted(os.environ.items()) if _SETTINGS.fullmatch(name)}
    return {name: value if _PLAIN.fullmatch(value) else "(set)" for name, value in found.items()}


def _plain(value: Any) -> Any:
    """Return a value for JSON: texts without private names, and no numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return without_private(value) if isinstance(value, str) else value
