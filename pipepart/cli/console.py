"""What a run shows: its own words, and nothing of the libraries' chatter."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

__all__ = ["bold", "dim", "quiet_libraries", "shown", "stand_out", "table"]


def _colours(stream: object = None) -> bool:
    out = sys.stdout if stream is None else stream
    return bool(getattr(out, "isatty", lambda: False)()) and "NO_COLOR" not in os.environ


def bold(text: str) -> str:
    return f"\033[1;36m{text}\033[0m" if _colours() else text


def dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if _colours() else text


def quiet_libraries() -> None:
    """Warnings of libraries about each other, and messages that say nothing to a user, are left out."""
    os.environ.setdefault("WANDB_SILENT", "true")  # where its files are is said at the end
    os.environ.setdefault("WANDB_CONSOLE", "off")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for message in (".*does not have many workers.*", ".*LeafSpec.*", ".*num_workers.*", ".*sync_dist=True.*"):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # the folder of the run is ours
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.distributed",
        "lightning.pytorch",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.distributed").setLevel(logging.ERROR)
    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # failures are told by `ranks`
    logging.getLogger("transformers").setLevel(logging.ERROR)


class _Stage(logging.Handler):
    """The messages of the strategy, first of all the table of stages, set apart from what is around them."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().rstrip().splitlines()
        width = max(map(len, lines), default=0)
        framed = [bold(lines[0]), *lines[1:]] if lines else []
        rule = dim("-" * min(width, 120)) if len(lines) > 1 else None
        print("\n".join([*([""] if rule else []), *framed, *([rule] if rule else [])]), flush=True)


def stand_out() -> None:
    """Show the messages of pipepart on the standard output."""
    log = logging.getLogger("pipepart")
    log.handlers = [_Stage()]
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.getLogger("pipepart.report").setLevel(logging.WARNING)  # where files are is said at the end


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows under a head; the first `left` columns to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
    return "\n".join([bold(lines[0]), "  ".join("-" * w for w in widths), *lines[1:]])


def shown(path: Path | str) -> str:
    """A path relative to where the user stands, if it is below."""
    found = Path(path).absolute()
    return str(found.relative_to(Path.cwd())) if found.is_relative_to(Path.cwd()) else str(found)
