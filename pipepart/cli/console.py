"""Terminal output: messages of pipepart, tables and paths, without the messages of other libraries."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from pipepart.values import printable

__all__ = ["bold", "dim", "quiet_libraries", "show_messages", "shown", "table"]


def _styled(text: str, style: str) -> str:
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\033[{style}m{text}\033[0m" if coloured else text


def bold(text: str) -> str:
    return _styled(text, "1;36")


def dim(text: str) -> str:
    return _styled(text, "2")


def quiet_libraries() -> None:
    """Silence warnings of libraries about each other, and messages that do not concern a user."""
    os.environ.setdefault("WANDB_SILENT", "true")  # the end of a run shows the path of its files
    os.environ.setdefault("WANDB_CONSOLE", "off")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for message in (
        "does not have many workers",
        "LeafSpec",
        "num_workers",
        "sync_dist=True",
        "exists and is not empty",
    ):
        warnings.filterwarnings("ignore", message=f".*{message}.*")
    for name, level in (
        ("lightning.pytorch", logging.WARNING),
        ("lightning.pytorch.utilities.rank_zero", logging.WARNING),
        ("lightning.fabric.utilities.distributed", logging.ERROR),
        ("transformers", logging.ERROR),
    ):
        logging.getLogger(name).setLevel(level)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # `ranks` reports failures


class _Messages(logging.Handler):
    """Prints the messages of pipepart, with a line below those of several lines, such as the table of stages."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = printable(record.getMessage().rstrip(), keep="\n\t").splitlines()
        if len(lines) > 1:
            lines = ["", bold(lines[0]), *lines[1:], dim("-" * min(max(map(len, lines)), 120))]
        elif lines:
            lines = [bold(lines[0])]
        try:
            print("\n".join(lines), flush=True)
        except OSError:  # the output goes to a file on a full disk, or to a program that has ended
            self.handleError(record)


def show_messages() -> None:
    """Show the messages of pipepart on the standard output."""
    log = logging.getLogger("pipepart")
    log.handlers = [_Messages()]
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.getLogger("pipepart.report").setLevel(logging.WARNING)  # the end of a run shows the paths of files


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows under a head; the first `left` columns are aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
    return "\n".join([bold(lines[0]), "  ".join("-" * w for w in widths), *lines[1:]])


def shown(path: object) -> str:
    """A path, relative to the current folder if it is below it. An address stays as it is."""
    if "://" in str(path):
        return str(path)
    found = Path(str(path)).absolute()
    return str(found.relative_to(Path.cwd())) if found.is_relative_to(Path.cwd()) else str(found)
