"""Lightning's own tests, without us and with `PipelineStrategy` in place of the default strategy.

    python -m tools.bench.lightning own CHECKOUT [--files NAME ...] [--stages 1|2] [--again failed|all] [--results FILE]

CHECKOUT is a folder with the repository of Lightning at the installed version; nothing of it is part of this repository.
Its test files import cloudpickle and jsonargparse[signatures], which must be installed; other missing packages skip some tests.
Each file runs in a process of its own (`--together N`: N files); with 2 stages, in one process for each rank, which run the
same tests together, and `BoringModel` has four layers in place of one. Results are kept in FILE after each process, and a
later call continues. The table counts the tests that pass without us and make a Trainer with the default strategy: how many
pass with us, how many are refused by name, how many fail; and how many of those that pass have a step that is not recorded
and runs as it is written, since one process has nothing to divide.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tools.bench.lightning.own_files import DDP, FILES, LAYERED, REASONS

_LAYERS = 4
_OTHER_RANKS = 20.0
"""Seconds in which the other ranks end after the first one has."""
_ROOT = Path(__file__).resolve().parents[3]


class Results:
    """The results of tests by mode ("plain", "stages=1", ...) and name, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.by_mode: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, mode: str, file: str) -> dict[str, dict[str, Any]]:
        return {test: entry for test, entry in self.by_mode.get(mode, {}).items() if _file_of(test) == file}

    def add(self, mode: str, found: dict[str, dict[str, Any]]) -> None:
        self.by_mode.setdefault(mode, {}).update(found)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.by_mode, indent=1, sort_keys=True))
        part.replace(self._path)


def _file_of(test: str) -> str:
    return test.partition("::")[0].removeprefix("tests/").removeprefix("tests_pytorch/")


class Runs:
    """Starts the processes that run tests."""

    def __init__(self, checkout: Path, limit: float) -> None:
        self._tests, self._limit = checkout / "tests", limit

    def run(self, files: list[str], asked: dict[str, Any], only: list[str] | None) -> dict[str, dict[str, Any]]:
        """The results of the tests of files. A test that ends its process or hangs is noted, and the others go on."""
        found: dict[str, dict[str, Any]] = {}
        left = only
        while left is None or left:
            collected, new = self._process(files, asked, left)
            found.update(new)
            left = [test for test in collected or left or [] if test not in found]  # collected: with all parameters
            if not new:
                found.update({test: {"state": "failed", "words": "was not run"} for test in left})
                break
        return found

    def _process(
        self, files: list[str], asked: dict[str, Any], only: list[str] | None
    ) -> tuple[list[str], dict[str, dict[str, Any]]]:
        with tempfile.TemporaryDirectory(prefix="own-tests-") as name:
            folder = Path(name)
            given: dict[str, Any] = {**asked, "report": str(folder / "report")}
            if only is not None:
                given["only"] = str(folder / "only.json")
                (folder / "only.json").write_text(json.dumps(only))
            (folder / "tmp").mkdir()
            if asked.get("stages", 1) > 1:
                given["folder"] = str(folder / "files")
            environment = {
                **os.environ,
                "PIPEPART_OWN_TESTS": json.dumps(given),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(folder / "tmp"),
            }
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(_ROOT), str(self._tests), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
            command = [sys.executable, "-m", "pytest", *(f"tests_pytorch/{file}" for file in files), "-q"]
            command += ["--continue-on-collection-errors"]
            command += ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "tools.bench.lightning.own_plugin"]
            with open(folder / "output", "wb") as output, _job(asked.get("stages", 1)) as ranks:
                children = [
                    subprocess.Popen(
                        command, cwd=self._tests, env={**environment, **rank}, stdout=output, stderr=output,
                        start_new_session=True,
                    )
                    for rank in ranks
                ]  # fmt: skip
                hung = self._wait(children, folder)
            collected, found = _read(folder, hung)
            if not found:
                print((folder / "output").read_text(errors="replace")[-2000:], file=sys.stderr)
            return collected, found

    def _wait(self, children: list[subprocess.Popen[bytes]], folder: Path) -> bool:
        """Wait until all ranks end, or write no result for too long. Returns whether they were ended for that.

        If one has ended and others have not, the others get a short time.
        """
        size, since, first = -1, time.monotonic(), 0.0
        try:
            while any(child.poll() is None for child in children):
                now = sum(report.stat().st_size for report in folder.glob("report.*"))
                if now != size:
                    size, since = now, time.monotonic()
                if any(child.poll() is not None for child in children):
                    first = first or time.monotonic()
                if time.monotonic() - since > self._limit or (first and time.monotonic() - first > _OTHER_RANKS):
                    return True
                time.sleep(0.2)
            return False
        finally:
            for child in children:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # with the processes that it has started
                child.wait()


@contextmanager
def _job(stages: int) -> Iterator[list[dict[str, str]]]:
    """The variables of each rank of a job that torchrun would start; of one process: none."""
    if stages == 1:
        yield [{}]
        return
    from pipepart.runtime.rendezvous import job_folder

    with job_folder() as folder:
        every = {
            "WORLD_SIZE": str(stages),
            "LOCAL_WORLD_SIZE": str(stages),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
        }
        every |= {"MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "own-tests", "PIPEPART_JOB": folder}
        yield [{**every, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(stages)]


def _entries(report: Path) -> Iterator[dict[str, Any]]:
    for line in report.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # else it is being written
            yield json.loads(line)


def _read(folder: Path, hung: bool) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The names of the collected tests, and the results of those that were started, from the reports of all ranks."""
    collected: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("report.*")):
        for entry in _entries(path):
            if "collected" in entry:
                collected = entry["collected"]
                continue
            test = entry.pop("test")
            before = found.get(test)
            if entry["state"] == "started":
                found.setdefault(test, entry)
            elif before is None or before["state"] in ("started", "passed"):  # a failure of any rank counts
                found[test] = entry
    for entry in found.values():
        if entry["state"] == "started":
            entry.update(state="failed", words="no result in time" if hung else "the process has ended")
    return collected, found


def _todo(results: Results, files: list[str], plain: str, ours: str, options: argparse.Namespace) -> list[str]:
    """The tests to run with us: those that pass without us and have no result yet, or are asked for again."""
    todo = []
    for file in files:
        known = results.of(ours, file)
        for test, entry in results.of(plain, file).items():
            done = test in known and (
                options.again == "no" or (options.again == "failed" and known[test]["state"] == "passed")
            )
            asked = not options.tests or any(part in test for part in options.tests)
            if entry["state"] == "passed" and entry.get("default", True) and asked and not done:
                todo.append(test)
    return todo


def _table(results: Results, files: list[str], plain: str, ours: str) -> float:
    """Print one row for each file and the reasons of all tests that do not pass; returns the part that passes."""
    total: Counter[str] = Counter()
    reasons: dict[str, list[str]] = {}
    print(f"\n{'file':58} {'without us':>10} {'with us':>8} {'refused':>8} {'fails':>6}")
    for file in files:
        mine = results.of(ours, file)
        passed = [test for test, entry in results.of(plain, file).items() if entry["state"] == "passed"]
        passing = [test for test in passed if test in mine and mine[test].get("default", True)]
        count: Counter[str] = Counter(passing=len(passing))
        for test in passing:
            entry = mine[test]
            kind = "passed" if entry["state"] == "passed" else "refused" if entry.get("ours") else "failed"
            count[kind] += 1
            count["written"] += kind == "passed" and bool(entry.get("written"))
            if kind != "passed":
                text = " ".join(f"{entry.get('kind', '')}: {entry.get('words', entry['state'])}".split())
                reasons.setdefault(f"{kind}: {text[:150]}", []).append(test)
        total += count
        if passing:
            print(f"{file:58} {len(passing):10} {count['passed']:8} {count['refused']:8} {count['failed']:6}")
    share = total["passed"] / max(1, total["passing"])
    print(
        f"{'all':58} {total['passing']:10} {total['passed']:8} {total['refused']:8} {total['failed']:6}  {share:.1%}\n"
    )
    print(f"{total['written']} of the passed tests have a step that is not recorded and runs as it is written\n")
    for text, tests in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(tests):4}  {text}")
        for test in tests:
            known = REASONS.get(test.partition("[")[0].removeprefix("tests/").removeprefix("tests_pytorch/"), "")
            print(f"        {test}{'  -- ' + known if known else ''}")
    return share


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder with the repository of Lightning")
    parser.add_argument("--files", nargs="+", default=[], help="parts of names of files; default: all")
    parser.add_argument("--tests", nargs="+", default=[], help="parts of names of tests; default: all")
    parser.add_argument("--stages", type=int, choices=(1, 2), default=1)
    parser.add_argument("--again", choices=("no", "failed", "all"), default="no", help="tests to run once more")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="number of files in one process")
    parser.add_argument("--results", type=Path, default=Path("lightning-own-tests.json"))
    parser.add_argument(
        "--limit", type=float, default=180.0, help="seconds without a result after which a test is ended"
    )
    parser.add_argument("--plain", action="store_true", help="run the tests without us only")
    parser.add_argument("--table", action="store_true", help="print the table of the kept results and run nothing")
    options = parser.parse_args(arguments)
    several = options.stages > 1
    names = sorted({test.partition("::")[0] for test in LAYERED}) if several else [*FILES, *DDP]
    files = [file for file in names if not options.files or any(part in file for part in options.files)]
    plain, ours = ("plain, layers", "stages=2") if several else ("plain", "stages=1")
    layers = {"layers": _LAYERS} if several else {}
    results, runs = Results(options.results), Runs(options.checkout.resolve(), options.limit)
    count = 0 if options.table else len(files)
    for first in range(0, count, options.together):
        group = files[first : first + options.together]
        unknown = [file for file in group if not results.of(plain, file)]
        if unknown:
            chosen = (
                [f"tests/tests_pytorch/{test}" for test in LAYERED if _file_of(test) in unknown] if several else None
            )
            results.add(plain, runs.run(unknown, layers, chosen))
        todo = [] if options.plain else _todo(results, group, plain, ours, options)
        if todo:
            concerned = sorted({_file_of(test) for test in todo})
            results.add(ours, runs.run(concerned, {**layers, "stages": options.stages}, todo))
        for file in group:
            states = Counter(entry["state"] for entry in results.of(ours, file).values())
            print(f"{file:58} {dict(states)}", flush=True)
    share = _table(results, files, plain, ours)
    return 0 if share >= 0.97 else 1
