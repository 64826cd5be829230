"""`pipepart selftest`: a whole run on two CPU ranks, and each kind of check with a planted failure."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_programs import PATIENCE, end, gone, path_with, start
from support.environment import job_environment
from support.standin import built_library, unavailable

from pipepart import load_cluster
from pipepart.cli.config import compose_config
from pipepart.cli.main import main
from pipepart.cli.selftest import crew, device_checks, selftest, selftest_run, transparency
from pipepart.cli.selftest.cluster_file import as_cluster, write_cluster
from pipepart.cli.selftest.crew import Answer, Place, Settings
from pipepart.cli.selftest.ending import _CAUSE, _judged
from pipepart.cli.selftest.message_checks import DTYPES, check_messages
from pipepart.cli.selftest.selftest_report import without_private
from pipepart.cli.selftest.small_models import MODELS
from pipepart.cli.selftest.transparency import Case, cases_of, check_transparency, judged
from pipepart.cli.selftest.verdicts import Verdict, passed
from pipepart.planning.request import TRAINING_SCHEDULES

CPU = ["selftest", "--quick", "--device", "cpu", "--devices", "2"]


# ---- a whole run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.Popen[str], str, Path]:
    """One quick run with a secret in its environment: the process, its output and its folder."""
    folder = tmp_path_factory.mktemp("selftest")
    process = start([*CPU, "--output", "out"], folder, WANDB_API_KEY="of-a-user-who-tests", NCCL_DEBUG="/home/me/file")
    return process, end(process), folder / "out"


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_quick_run_passes_and_leaves_no_process(run) -> None:
    process, output, _ = run
    assert process.returncode == 0, output
    lines = output.splitlines()
    for dtype in DTYPES:
        for transport in ("shared memory", "group, host memory"):
            assert sum(line.startswith("ok ") and f"{transport}, {dtype} " in line for line in lines) == 1
    assert "skipped  transports    group, device memory" in output
    for word in (*MODELS, *TRAINING_SCHEDULES, "is killed in a step", "raises in a step", "all-reduce over 2 devices"):
        assert any(line.startswith("ok ") and word in line for line in lines), word
    assert "0 failed" in output and "Traceback" not in output and "Warning" not in output
    assert gone(process.pid)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_json_file_has_results_and_nothing_private(run) -> None:
    text = (run[2] / "selftest.json").read_text()
    data = json.loads(text)
    assert data["torch"] == torch.__version__ and data["device_type"] == "cpu" and data["ranks"] == 2
    assert data["counts"]["fail"] == 0 and data["counts"]["ok"] > 50
    pair = next(check for check in data["checks"] if check["name"] == "devices 0 and 1")
    assert pair["figures"]["bandwidth"] > 1e6 and len(pair["figures"]["seconds"]) == 3
    assert data["settings"]["NCCL_DEBUG"] == "(set)"
    for private in (str(run[2]), str(Path.home()), "of-a-user-who-tests", "/home", "/tmp"):
        assert private not in text
    for name in (getpass.getuser(), socket.gethostname()):
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_cluster_file_can_be_planned_for(run) -> None:
    file = run[2] / "cluster" / "measured.yaml"
    cluster = load_cluster(file)
    assert cluster.size == 2 and cluster.devices[0].flops["float32"] > 1e8
    for found in (compose_config(["cluster=measured"], "plan", run[2]), compose_config([f"cluster={file}"], "plan")):
        assert found.cluster.links.pair.bandwidth == cluster.link(0, 1).bandwidth


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    process = start(CPU, tmp_path)
    assert process.stdout is not None
    assert "2 cpu device(s)" in process.stdout.readline()
    assert process.stdout.readline().startswith("ok ")  # the ranks are there
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    output = end(process)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert gone(process.pid)


_ON_STANDIN = """
import sys
from pathlib import Path
from pipepart.cli.selftest import selftest_run, transparency
selftest_run.DTYPES = ("int16", "bool", "float32")
selftest_run.cases_of = lambda size, quick: [transparency.Case("tied weights", 1, 2, "zb_v")]
sys.exit(selftest_run.selftest(quick=True, output=Path("out"), timeout=200.0, libraries=["standin_on"]))
"""
"""A program: a self-test with fewer dtypes and one case, since other tests run pipelines on the stand-in."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_accelerator_passes(tmp_path: Path) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    built_library()
    (tmp_path / "standin_on.py").write_text("from support.standin import enable\nenable()\n")
    places = os.pathsep.join([path_with(tmp_path), str(Path(__file__).parents[1])])
    ran = subprocess.run(
        [sys.executable, "-c", _ON_STANDIN],
        cwd=tmp_path,
        env=job_environment(PYTHONPATH=places, STANDIN_DEVICES="2"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "pipepart selftest  2 standin device(s), quick"
    for transport in ("shared memory", "group, host memory", "group, device memory"):
        assert sum(line.startswith("ok ") and f"{transport}, int16 " in line for line in lines) == 1
    assert "0 failed, 0 skipped" in ran.stdout
    data = json.loads((tmp_path / "out" / "selftest.json").read_text())
    assert data["backend"] == "standin_ccl" and data["devices"][1]["device"] == "standin:1"
    assert load_cluster(tmp_path / "out" / "cluster" / "measured.yaml").devices[0].name == "stand_in"


# ---- planted failures


def _fine(place: Place) -> Verdict:
    place.meet()
    return passed("met")


def _raises(place: Place) -> Verdict:
    if place.rank == 1:
        raise ValueError("planted")
    place.meet()
    return passed("met")


def _stays(place: Place) -> Verdict:
    time.sleep(PATIENCE if place.rank == 0 else 0)
    return passed("came")


class _Flipping:
    """A transport that changes one bit of every tensor that it sends."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.recv = inner, inner.recv

    def send(self, tensor: torch.Tensor, target: int) -> Any:
        changed = tensor.clone()
        if changed.numel():
            changed.view(-1).view(torch.uint8)[0] ^= 1
        return self.inner.send(changed, target)


def _flips(place: Place) -> Verdict:
    plain = place.transport("group", place.host)
    if place.rank == 0:
        place._transports["group", "cpu"] = _Flipping(plain)
    return check_messages(place, "group, host memory", "int16")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_planted_failures_are_named_and_stop_no_other_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planted(session: selftest_run.Session) -> None:
        for name, function in (("flips", _flips), ("raises", _raises), ("fine", _fine)):
            session.on_ranks("planted", name, function)
        session.crews.of(2).settings = replace(session.settings, timeout=2.0)
        session.on_ranks("planted", "stays", _stays)
        raise ZeroDivisionError("of the part itself")

    def last(session: selftest_run.Session) -> None:
        session.check("last", "in this process", lambda: passed("ran"))

    monkeypatch.setattr(selftest_run, "PARTS", {"planted": planted, "last": last})
    monkeypatch.setattr(crew, "_MOMENT", 2.0)
    assert selftest(2, "cpu", quick=True, output=tmp_path, timeout=60.0) == 1
    output = capsys.readouterr().out
    states = {line.split()[2]: line for line in output.splitlines() if "  planted  " in line}
    assert (
        states["flips"].startswith("FAIL")
        and "rank 1: 4 tensor(s) of int16 arrived with other bytes" in states["flips"]
    )
    assert states["raises"].startswith("FAIL") and "rank 1: ValueError: planted" in states["raises"]
    assert states["fine"].startswith("ok") and "met" in states["fine"]
    assert (
        states["stays"].startswith("FAIL") and "rank 0: did not finish within the time limit of 2 s" in states["stays"]
    )
    assert "broken off by ZeroDivisionError: of the part itself" in output
    assert "ok       last" in output
    assert "2 ok, 4 failed, 0 skipped" in output and "failed: planted, raises" in output
    data = json.loads((tmp_path / "selftest.json").read_text())
    assert data["counts"] == {"ok": 2, "fail": 4, "skipped": 0}
    assert "ValueError: planted" in (tmp_path / "logs" / "ranks-2-rank-1.txt").read_text()


def _alone(tmp_path: Path) -> Place:
    return Place(0, 1, torch.device("cpu"), Settings("cpu", 60.0, True, (), str(tmp_path), str(tmp_path)))


@pytest.fixture
def case_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Place, Case]]:
    """A case on one process, which needs no other."""
    monkeypatch.setenv("PIPEPART_CACHE", str(tmp_path))
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        yield _alone(tmp_path), Case("tied weights", 1, 1, "1f1b")
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["nothing", "a gradient", "the loss", "a buffer"])
def test_a_difference_from_one_device_is_found(
    case_alone: tuple[Place, Case], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    (place, case), compute = case_alone, transparency._one_device
    case = replace(case, model="BatchNorm") if wrong == "a buffer" else case

    def slightly_wrong(*args: Any) -> Any:
        found = compute(*args)
        if wrong == "a gradient":
            found.gradients["layers.1.bias"][3] *= 1 + 1e-6
        if wrong == "a buffer":
            found.state["norms.2.running_mean"][1] += 1e-6
        return replace(found, loss=found.loss * (1 + 1e-8)) if wrong == "the loss" else found

    monkeypatch.setattr(transparency, "_one_device", slightly_wrong)
    verdict = judged([check_transparency(place, case)])
    if wrong == "nothing":
        assert verdict.state == "ok" and verdict.figures["difference"] < 1e-12
    else:
        names = {
            "a gradient": "the gradient of layers.1.bias differs",
            "the loss": "the loss differs",
            "a buffer": "norms.2.running_mean after the step differs",
        }
        assert verdict.state == "fail" and names[wrong] in verdict.text


def test_a_parameter_that_no_rank_holds_is_found() -> None:
    verdicts = [passed("", difference=0.0, parameters=["a"], expected=["a", "b"]) for _ in range(2)]
    assert judged(verdicts).text == "no rank holds b"


def test_a_wrong_product_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_checks.check_products(_alone(tmp_path)).state == "ok"
    monkeypatch.setattr(device_checks, "_TOLERANCES", {"float32": 1e-12})
    verdict = device_checks.check_products(_alone(tmp_path))
    assert verdict.state == "fail" and "in float32 differs from the CPU" in verdict.text


@pytest.mark.parametrize(
    ("how", "answers", "ended", "state", "text"),
    [
        ("raises", [(True, (f"failed: {_CAUSE}", 5.0)), (True, (_CAUSE, 5.0))], 6.0, "ok", "within 1.0 s"),
        ("killed", [(True, ("lost another rank", 5.0)), (False, "signal SIGKILL")], 8.0, "ok", "within 3.0 s"),
        ("raises", [(True, ("", 5.0)), (True, (_CAUSE, 5.0))], 6.0, "fail", "it has noticed nothing"),
        (
            "raises",
            [(True, ("Timed out", 5.0)), (True, (_CAUSE, 5.0))],
            6.0,
            "fail",
            "does not show the cause: Timed out",
        ),
        ("raises", [(True, (_CAUSE, 5.0)), (True, (_CAUSE, 5.0))], 16.0, "fail", "11.0 s after the failure"),
        ("killed", [(False, "did not end"), (False, "signal SIGKILL")], 16.0, "fail", "rank 0: did not end"),
        ("killed", [(True, ("", 5.0)), (True, ("", 5.0))], 6.0, "fail", "rank 1 was to be killed"),
    ],
)
def test_the_end_of_a_job_is_judged(how: str, answers: list[Any], ended: float, state: str, text: str) -> None:
    found = [Answer(rank, 0.0, ok, value) for rank, (ok, value) in enumerate(answers)]
    verdict = _judged(how, found, 1, [], ended)
    assert verdict.state == state and text in verdict.text


# ---- requests, cases, files


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "gpu0"], "--device gpu0"),
        (["--device", "cpu:1"], "expected a type without an index"),
        (["--device", "meta"], "has no meta device"),
        (["--device", "cpu", "--devices", "0"], "--devices 0: expected 1 to 64 for cpu"),
        (["--timeout", "1"], "expected at least 5 seconds"),
        (["--timeout", "nan"], "expected at least 5 seconds"),
        (["--import", "no_such_module_here"], "--import no_such_module_here: this module cannot be imported"),
        (["--device", "cpu", "--output", "/proc/nothing"], "Give a folder that can be written"),
    ],
)
def test_wrong_requests_are_refused_before_a_process_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", *words]) == 2
    assert message in capsys.readouterr().err


def test_inside_a_job_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert main(["selftest"]) == 2
    assert "call it without torchrun" in capsys.readouterr().err


def test_every_model_meets_every_schedule_at_every_shape() -> None:
    whole = cases_of(4, quick=False)
    pairs = {(model, schedule) for model in MODELS for schedule in TRAINING_SCHEDULES}
    assert {(case.model, case.schedule) for case in whole if case.replicas == 1} == pairs
    assert {(case.replicas, case.stages) for case in whole} == {(1, 4), (2, 2), (4, 1)}
    for cases in (cases_of(2, quick=True), [case for case in whole if (case.replicas, case.stages) == (2, 2)]):
        assert {case.model for case in cases} == set(MODELS)
        assert {case.schedule for case in cases} == set(TRAINING_SCHEDULES)
    assert len(set(whole)) == len(whole)


def test_a_cluster_of_two_kinds_is_written_and_read(tmp_path: Path) -> None:
    device = {"flops": {"float32": 1e12}, "memory_bandwidth": 1e11, "memory": 8e9, "launch": 1e-5}
    devices = [{"name": "Fast 1", **device}, {"name": "Slow-2", **device, "memory": 4e9}, {"name": "Fast 1", **device}]
    pairs = {
        name: {"bandwidth": 1e9 * (i + 1), "latency": 1e-5} for i, name in enumerate(("0 and 1", "0 and 2", "1 and 2"))
    }
    read = write_cluster(tmp_path / "cluster" / "measured.yaml", as_cluster(devices, pairs), pairs)
    assert [kind.name for kind in read.devices] == ["fast_1", "fast_1", "slow_2"]
    assert read.kinds["slow_2"].memory == 4e9 and read.link(0, 2).bandwidth == 2e9


def test_texts_lose_what_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret-word")
    host, user = socket.gethostname(), getpass.getuser()
    text = f'File "/home/someone/code/train.py", line 3, on {host} by {user} at 10.1.2.3:29500 with very-secret-word, 5 GB/s'
    cleaned = without_private(text)
    assert cleaned == 'File "train.py", line 3, on NAME by NAME at ADDRESS:29500 with ***, 5 GB/s'
