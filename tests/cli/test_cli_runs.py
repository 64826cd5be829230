"""The command as a user gives it: real processes, real folders, failures and interruptions."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_programs import PATIENCE, end, gone, start, train_trouble, trouble_folder

from pipepart.cli.main import main
from pipepart.planning import Plan


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    """Three runs that come to a bad end, started at the same time: most of what they do is to import libraries."""
    found = {}
    for name, trouble, steps in (
        ("raise", "raise", 10),
        ("killed", "none", 1_000_000),
        ("interrupted", "none", 1_000_000),
    ):
        folder = trouble_folder(tmp_path_factory.mktemp(name))
        found[name] = folder, train_trouble(folder, trouble, steps)
    yield found
    for _, process in found.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_raises_ends_the_run_with_its_reason(programs) -> None:
    folder, process = programs["raise"]
    output = end(process)
    assert process.returncode == 1, output
    assert "rank 1 failed first" in output
    assert "ValueError: boom on purpose" in output
    assert "trouble.py:12 in on_train_batch_start" in output
    assert output.count("Traceback") == 0
    assert (folder / "outputs" / "latest" / "logs" / "traceback-rank1.txt").is_file()
    assert gone(process.pid)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_killed_and_interrupted_runs_leave_nothing_behind(programs, how: str) -> None:
    folder, process = programs[how]
    deadline = time.monotonic() + PATIENCE
    while not (folder / "pid1").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    time.sleep(1.0)
    if how == "killed":
        os.kill(int((folder / "pid1").read_text()), signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output = end(process)
    assert process.returncode == 1, output
    assert ("rank 1 was ended by SIGKILL" if how == "killed" else "stopped by SIGINT") in output
    assert "Traceback" not in output
    assert gone(process.pid)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_from_the_command_line_can_be_trained_with(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["recipe=mlp", "model.width=16"]
    assert main(["plan", *small, "strategy.stages=2", "strategy.schedule=gpipe", "-o", "plan.json"]) == 0
    short = ["logger=none", "callbacks=none", "trainer.max_steps=2", "trainer.limit_val_batches=0"]
    words = ["train", *small, "strategy.plan=plan.json", *short]
    done = start(words, Path.cwd())
    said = end(done)
    assert done.returncode == 0, said
    assert Plan.load("outputs/latest/plan.json") == Plan.load("plan.json")


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_sweep_over_two_jobs_runs_two_jobs(tmp_path: Path) -> None:
    short = ["logger=none", "callbacks=none", "trainer.max_steps=2", "trainer.limit_val_batches=0"]
    words = ["train", "-m", "recipe=mlp", *short, "strategy.schedule=gpipe,1f1b", "strategy.microbatches=2"]
    process = start(words, tmp_path)
    said = end(process)
    assert process.returncode == 0, said
    runs = sorted(tmp_path.glob("outputs/sweeps/*/*/*/result.json"))
    assert [run.parent.name for run in runs] == ["0", "1"]
    assert said.count("2 processes") == 2
    rows = list(csv.DictReader(next(tmp_path.glob("outputs/sweeps/*/*/summary.csv")).open()))
    assert {row["strategy.schedule"] for row in rows} == {"gpipe", "1f1b"}
    assert all(row["outcome"] == "ok" for row in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "strategy.stagse=2"], "did you mean 'stages'"),
        (["train", "trainer.max_steps=x"], "wrong type"),
        (["train", "recipe=gtp"], "did you mean 'gpt'"),
        (["train", "-m", "strategy.schedule=gpipe,1fb1"], "did you mean '1f1b'"),
        (["trian"], "did you mean 'train'"),
        (["view", "nowhere"], "nothing at"),
        (["train", "--config-dir", "nowhere"], "is not a folder"),
    ],
)
def test_mistakes_are_one_message_and_a_code(
    words: list[str], expected: str, capsys, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing may be started
    assert main(words) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert len(said.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help_recipes_and_configuration_are_shown(capsys) -> None:
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "--cfg" in shown
    assert "1f1b, auto, gpipe, hybrid, interleaved, replicas" in shown
    assert main(["recipes"]) == 0
    assert "A U-Net" in capsys.readouterr().out
    assert main(["train", "recipe=mlp", "--cfg", "job", "strategy.stages=2"]) == 0
    shown = capsys.readouterr().out
    assert "stages: 2" in shown
    assert "_target_: recipes.mlp.MLPModule" in shown


def test_help_lists_and_unknown_words_need_no_library() -> None:
    """What a user sees first must come at once: neither torch nor Lightning is imported for it."""
    words = [["--help"], ["train", "--cfg", "job", "recipe=gtp"], ["recipes"], ["trian"], ["train", "-m", "recipe=gtp"]]
    code = (
        "import sys; from pipepart.cli.main import main; import pipepart\n"
        f"codes = [main(words) for words in {words!r}]\n"
        "heavy = {'torch', 'lightning', 'wandb', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print(codes, sorted(heavy), pipepart.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.splitlines()[-1].startswith("[0, 2, 0, 2, 2] []"), done.stdout + done.stderr


@pytest.mark.slow
def test_the_garbage_collector_works_after_the_libraries_are_loaded() -> None:
    code = (
        "import gc, sys; from pipepart.cli.libraries import load_libraries; load_libraries()\n"
        "assert 'lightning' in sys.modules and gc.isenabled() and gc.get_freeze_count() > 100_000"
    )
    subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, check=True)


@pytest.mark.slow
def test_public_names_are_there_whatever_is_imported_first() -> None:
    """Also the function `capture` beside the package of that name, and the strategy's name once Lightning is there."""
    code = (
        "import pipepart\n"
        "from pipepart.recording import Recording\n"
        "assert pipepart.capture.__module__ == 'pipepart.graph.captured' and 'capture' in dir(pipepart)\n"
        "import lightning as L\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "assert isinstance(StrategyRegistry.get('pipepart'), pipepart.PipelineStrategy)\n"
        "assert not hasattr(pipepart, 'nothing')"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], timeout=PATIENCE, check=True)


def test_doctor_looks_at_everything(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["doctor", "--quick"])
    said = capsys.readouterr().out
    assert code == 0, said
    for subject in ("python", "torch", "recipes", "cores", "gloo", "ports", "shared memory", "output folder"):
        assert subject in said
