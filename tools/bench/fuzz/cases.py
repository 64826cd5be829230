"""Runs cases: each within a time limit, with a watch over processes and sockets, and a table at the end."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pipepart
from pipepart.errors import PipepartError
from tools.bench.fuzz.mutate import shrunk
from tools.bench.fuzz.parts import Part, special_files

__all__ = ["Finding", "Outcome", "run", "run_part"]

_PATIENCE = 300.0
"""Seconds of a case on a machine that is busy with other work; a case that waits for something ends here."""
_MEMORY = 2 * 2**30
"""Bytes that all cases together may add to the memory of the process."""
_STARTS = (
    "subprocess.",
    "os.fork",
    "os.posix_spawn",
    "os.exec",
    "os.spawn",
    "os.system",
    "socket.bind",
    "socket.connect",
)
_MOST_FINDINGS = 10
"""Different findings of a part after which it ends."""


class TooLong(BaseException):
    """A case that does not end."""


class Started(BaseException):
    """A case that starts a process or opens a socket."""


@dataclass
class Finding:
    """An error other than a `PipepartError`, with the smallest case that shows it."""

    what: str
    case: Any
    trace: str


@dataclass
class Outcome:
    """The cases of one part."""

    name: str
    refused: int = 0
    taken: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    """Processor seconds of the slowest case."""
    findings: dict[str, Finding] = field(default_factory=dict)


_PACKAGE = str(Path(pipepart.__file__).parent)
_watching = False
_hooked = False


def _watch(event: str, _: Any) -> None:
    if _watching and event.startswith(_STARTS):
        raise Started(event)


def _failure(run_: Callable[[Any], object], case: Any, limit: float) -> tuple[str, BaseException | None]:
    """A name for the failure of a case, empty if it was taken or refused, and its error."""
    global _watching

    def end(*_: Any) -> None:
        raise TooLong

    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, end)
    _watching = True
    signal.setitimer(signal.ITIMER_PROF, limit)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
    try:
        run_(case)
        return "", None
    except PipepartError as error:
        text = str(error)
        return ("an error without a text", error) if not text else ("", error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        last = next((frame for frame in frames if frame.filename.startswith(_PACKAGE)), None)
        place = "" if last is None or isinstance(error, TooLong) else f" in {last.name}"
        return f"{type(error).__name__}{place}", error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _watching = False


def _note(outcome: Outcome, name: str, error: BaseException | None, case: Any, part: Part) -> None:
    if name in outcome.findings or error is None:
        return
    small = case
    if name != "TooLong":
        small = shrunk(case, lambda smaller: _failure(part.run, smaller, part.limit)[0] == name)
    trace = "".join(traceback.format_exception(error)[-4:])
    outcome.findings[name] = Finding(f"{name}: {error!s:.200}", small, trace)


def run_part(part: Part, cases: int, seed: int) -> Outcome:
    """Run cases of one part, and the special files of a reader."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_watch)
        _hooked = True
    outcome = Outcome(part.name)
    start = time.monotonic()
    for case in range(cases):
        drawn = part.draw(random.Random(f"{seed} {part.name} {case}"))
        before = time.process_time()
        name, error = _failure(part.run, drawn, part.limit)
        outcome.slowest = max(outcome.slowest, time.process_time() - before)
        outcome.refused += error is not None and not name
        outcome.taken += error is None
        if name:
            _note(outcome, name, error, drawn, part)
            if len(outcome.findings) >= _MOST_FINDINGS:
                break
    if part.file is not None:
        _run_special_files(part, outcome)
    outcome.seconds = time.monotonic() - start
    return outcome


def _run_special_files(part: Part, outcome: Outcome) -> None:
    """Put files of other kinds in the place of the file of a reader."""
    file = part.file
    assert file is not None
    assert part.read is not None
    for kind, put in special_files().items():
        file.unlink(missing_ok=True)
        put(file)
        name, error = _failure(part.read, file, part.limit)
        outcome.refused += error is not None and not name
        outcome.taken += error is None
        if name and error is not None:
            trace = "".join(traceback.format_exception(error)[-4:])
            outcome.findings[f"{kind}: {name}"] = Finding(f"{name}: {error!s:.200}", kind, trace)
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def run(parts: Sequence[Part], cases: int, seed: int) -> bool:
    """Run so many cases of all parts together, and print a table; returns whether there is no finding."""
    print(f"seed {seed}, {cases:,} cases", flush=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY, most))
    total = sum(part.weight for part in parts)
    start, outcomes = time.monotonic(), []
    for part in parts:
        outcomes.append(run_part(part, max(1, round(cases * part.weight / total)), seed))
        for finding in outcomes[-1].findings.values():
            print(
                f"\nFINDING in {part.name}: {finding.what}\ncase: {finding.case!r:.2000}\n{finding.trace}", flush=True
            )
    print(f"\n{'part':<18} {'cases':>9} {'refused':>9} {'taken':>9} {'cases/s':>8} {'slowest':>9} {'findings':>9}")
    for o in outcomes:
        count = o.refused + o.taken
        rate = count / max(o.seconds, 1e-9)
        print(
            f"{o.name:<18} {count:>9,} {o.refused:>9,} {o.taken:>9,} {rate:>8,.0f} {o.slowest:>7.3f} s {len(o.findings):>9}"
        )
    count, seconds = sum(o.refused + o.taken for o in outcomes), time.monotonic() - start
    found = sum(len(o.findings) for o in outcomes)
    print(
        f"{count:,} cases in {seconds:.0f} s ({count / max(seconds, 1e-9):,.0f} a second), {found} findings, seed {seed}"
    )
    return not found
