"""`pipepart selftest`: all checks of this machine, one after the other. A check that fails stops no other."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch

from pipepart.cli.console import bold, quiet_libraries, shown
from pipepart.cli.processes import refuse_inside_job, silence_tracker
from pipepart.cli.selftest.cluster_file import CLUSTER, as_cluster, write_cluster
from pipepart.cli.selftest.crew import Crews, Settings, load
from pipepart.cli.selftest.device_checks import check_memory, check_products
from pipepart.cli.selftest.ending import ENDINGS, check_ending
from pipepart.cli.selftest.message_checks import DTYPES, TRANSPORTS, check_messages
from pipepart.cli.selftest.selftest_report import Report
from pipepart.cli.selftest.speeds import measure_all_reduce, measure_device, measure_pair
from pipepart.cli.selftest.transparency import cases_of, check_transparency, judged
from pipepart.cli.selftest.verdicts import FAIL, SKIPPED, Check, Verdict, combined, failed, passed
from pipepart.devices import accelerator, device_backend, device_count
from pipepart.errors import ConfigError, PipepartError
from pipepart.machine import usable_cores

__all__ = ["PARTS", "Session", "selftest"]

_MOST_CORES = 4  # ranks on the CPU, unless more are asked for


@dataclass
class Session:
    """One self-test: its ranks, its results and its figures."""

    size: int
    settings: Settings
    output: Path
    crews: Crews
    report: Report = field(default_factory=Report)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def cluster_file(self) -> Path:
        return self.output / "cluster" / f"{CLUSTER}.yaml"

    def check(self, subject: str, name: str, judge: Callable[[], Verdict]) -> Verdict:
        """Add the verdict of a check to the report. An error of the check is its failure."""
        begun = time.monotonic()
        try:
            verdict = judge()
        except PipepartError as error:
            verdict = failed(str(error))
        except Exception as error:
            verdict = failed(f"{type(error).__name__}: {error}")
        self.report.add(Check(subject, name, verdict.state, verdict.text, time.monotonic() - begun, verdict.figures))
        return verdict

    def on_ranks(
        self,
        subject: str,
        name: str,
        function: Callable[..., Verdict],
        *args: Any,
        size: int | None = None,
        judge: Callable[[list[Verdict]], Verdict] = combined,
    ) -> Verdict:
        """Add one check that all ranks do together."""
        return self.check(subject, name, lambda: judge(self.crews.run(size or self.size, function, *args)))

    def by_rank(self, subject: str, name: str, function: Callable[..., Verdict]) -> list[Verdict]:
        """Add one check for each rank; all ranks do it at the same time."""
        begun = time.monotonic()
        try:
            verdicts = self.crews.run(self.size, function)
        except PipepartError as error:
            verdicts = [failed(str(error))] * self.size
        for rank, verdict in enumerate(verdicts):
            seconds = time.monotonic() - begun
            title = f"{name}, device {rank}"
            self.report.add(Check(subject, title, verdict.state, verdict.text, seconds, verdict.figures))
        return verdicts

    def skip(self, subject: str, name: str, reason: str) -> None:
        """Add a check that cannot be done on this machine."""
        self.report.add(Check(subject, name, SKIPPED, reason))


def _devices(session: Session) -> None:
    found = session.by_rank("devices", "memory", check_memory)
    session.figures["devices"] = [dict(verdict.figures) for verdict in found]
    session.by_rank("devices", "products", check_products)


def _messages(session: Session) -> None:
    for title in TRANSPORTS:
        for dtype in DTYPES:
            verdict = session.on_ranks("transports", f"{title}, {dtype}", check_messages, title, dtype)
            if verdict.state == SKIPPED and "no tensors" not in verdict.text:
                break  # the transport cannot be used here at all


def _speeds(session: Session) -> None:
    devices = [dict(verdict.figures) for verdict in session.by_rank("speeds", "speed", measure_device)]
    pairs: dict[str, dict[str, float]] = {}
    for first in range(session.size):
        for second in range(first + 1, session.size):
            name = f"{first} and {second}"

            def judge(verdicts: list[Verdict], first: int = first) -> Verdict:
                return verdicts[first] if all(v.state != FAIL for v in verdicts) else combined(verdicts)

            verdict = session.on_ranks("speeds", f"devices {name}", measure_pair, first, second, judge=judge)
            if verdict.state != FAIL:
                pairs[name] = dict(verdict.figures)
    session.on_ranks("speeds", f"all-reduce over {session.size} devices", measure_all_reduce)
    session.check("speeds", "cluster file", lambda: _cluster(session, devices, pairs))


def _cluster(session: Session, devices: Sequence[dict[str, Any]], pairs: dict[str, dict[str, float]]) -> Verdict:
    if not pairs or len(devices) != session.size or not all(device.get("memory") for device in devices):
        return failed("devices or links were not measured, so there is nothing to write")
    data = as_cluster(devices, pairs)
    session.figures["cluster"] = data
    read = write_cluster(session.cluster_file, data, pairs)
    return passed(f"{read.size} devices, read back with the reader of cluster files")


def _transparency(session: Session) -> None:
    sizes = sorted({2, session.size} if session.settings.quick else range(2, session.size + 1), reverse=True)
    for size in sizes:
        for case in cases_of(size, session.settings.quick):
            session.on_ranks("transparency", str(case), check_transparency, case, size=size, judge=judged)


def _endings(session: Session) -> None:
    for how in ENDINGS:
        name = f"rank 1 of 2 {'is killed' if how == 'killed' else how} in a step"
        session.check("failures", name, lambda how=how: check_ending(session.crews.of(2), how))  # type: ignore[misc]


PARTS: dict[str, Callable[[Session], None]] = {
    "devices": _devices,
    "transports": _messages,
    "speeds": _speeds,
    "transparency": _transparency,
    "failures": _endings,
}
"""The parts of a self-test. All but the first need two devices."""


def selftest(
    devices: int | None = None,
    device: str | None = None,
    quick: bool = False,
    output: Path = Path("outputs/selftest"),
    timeout: float = 120.0,
    libraries: Sequence[str] = (),
) -> int:
    """Run all checks, print their results and write them to files; returns 1 if a check has failed."""
    refuse_inside_job("pipepart selftest")
    if not timeout >= 5:
        raise ConfigError(f"--timeout {timeout:g}: expected at least 5 seconds for each check")
    quiet_libraries()
    silence_tracker()
    load(libraries)
    kind = _kind(device)
    size = _size(devices, kind, quick)
    try:
        (output / "logs").mkdir(parents=True, exist_ok=True)
        for old in (output / "logs").glob("ranks-*.txt"):
            old.unlink()
    except OSError as error:
        raise ConfigError(f"--output {shown(output)}: {error.strerror}. Give a folder that can be written.") from error
    with tempfile.TemporaryDirectory(prefix="pipepart-selftest-") as cache:
        logs = str((output / "logs").resolve())
        settings = Settings(kind, timeout, quick, tuple(libraries), cache, logs)
        session = Session(size, settings, output, Crews(settings))
        print(f"{bold('pipepart selftest')}  {size} {kind} device(s), {'quick' if quick else 'all checks'}", flush=True)
        begun = time.monotonic()
        with _ended_by_signal():
            try:
                _run_parts(session)
            finally:
                session.crews.close()
    seconds = time.monotonic() - begun
    print(f"\n{session.report.summary()}\n{seconds:.0f} s in all")
    results = output / "selftest.json"
    more = {"device_type": kind, "ranks": size, "quick": quick, "timeout": timeout, "seconds": round(seconds, 1)}
    try:
        session.report.write(results, {**more, "backend": device_backend(torch.device(kind)), **session.figures})
    except OSError as error:
        raise ConfigError(f"--output {shown(output)}: {error.strerror}. Give a folder that can be written.") from error
    if "cluster" in session.figures:
        file = shown(session.cluster_file)
        print(f"{bold('cluster')}  {file} (plan for this machine with: pipepart plan cluster={file})")
    print(f"{bold('report')}   {shown(results)} (attach it to a report of a problem)")
    return 1 if session.report.count(FAIL) else 0


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Let SIGTERM end the ranks and remove the temporary files as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop) if current_thread() is main_thread() else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _run_parts(session: Session) -> None:
    for name, part in PARTS.items():
        if name != "devices" and session.size < 2:
            session.skip(name, "all", "needs two devices; --device cpu --devices 2 checks the paths of the CPU")
            continue
        try:
            part(session)
        except Exception as error:  # a part that breaks must not stop the others
            text = f"the checks of this part were broken off by {type(error).__name__}: {error}"
            session.check(name, "all", lambda text=text: failed(text))  # type: ignore[misc]


def _kind(wanted: str | None) -> str:
    """Return the type of the devices: the one that is asked for, else that of the accelerator, else the CPU."""
    if wanted is None:
        return accelerator() or "cpu"
    try:
        found = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"--device {wanted}: {str(error).splitlines()[0]}") from error
    if found.index is not None:
        raise ConfigError(f"--device {wanted}: expected a type without an index; --devices N uses the first N of them")
    if found.type != "cpu" and not _count(found.type):
        raise ConfigError(
            f"--device {wanted}: this build of torch, or this host, has no {found.type} device. Use --device cpu, import its "
            "library with --import, or check the driver with `pipepart doctor`."
        )
    return found.type


def _count(kind: str) -> int:
    try:
        return device_count(kind)
    except (RuntimeError, AttributeError):  # torch has no module for this type
        return 0


def _size(wanted: int | None, kind: str, quick: bool) -> int:
    if kind == "cpu":
        usual = 2 if quick else max(2, min(usable_cores(), _MOST_CORES))
        most = 64
    else:
        usual = most = _count(kind)
    if wanted is not None and not 1 <= wanted <= most:
        raise ConfigError(f"--devices {wanted}: expected 1 to {most} for {kind}")
    return usual if wanted is None else wanted
