"""Runs with an address of an object store as their output: files, checkpoints, restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_programs import end, path_with, start
from support.object_store import BUCKET, made_store
from test_cli_restarts import MODULE

from pipepart.cli.remote_output import localised, work_folder
from pipepart.lightning.remote_files import RemoteFile


def test_folders_of_this_host() -> None:
    assert work_folder("outputs/a") == Path("outputs/a")
    assert work_folder("s3://bucket/../runs//a/") == Path("outputs/s3/bucket/runs/a")
    config = {
        "output": "s3://b/a",
        "callbacks": {"checkpoint": {"dirpath": "s3://b/a/checkpoints"}, "monitor": {"folder": "s3://b/a"}},
        "logger": {"csv": {"save_dir": "s3://b/a", "name": "s3://b/another"}},
    }
    found = localised(config, Path("/x"))
    assert found["callbacks"] == {"checkpoint": {"dirpath": "s3://b/a/checkpoints"}, "monitor": {"folder": "/x"}}
    assert found["logger"] == {"csv": {"save_dir": "/x", "name": "s3://b/another"}}


@pytest.mark.slow
@pytest.mark.long
def test_a_run_restarts_from_the_checkpoint_at_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies.py").write_text(MODULE)
    words = [
        "train",
        "recipe=mlp",
        "model._target_=dies.Dies",
        "allow=[dies]",
        "logger=csv",
        f"output={BUCKET}/runs/cli",
    ]
    words += [
        "trainer.max_steps=8",
        "trainer.val_check_interval=4",
        "trainer.limit_val_batches=1",
        "launcher.failures=1",
    ]
    with made_store() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        process = start(words, tmp_path, PYTHONPATH=path_with(tmp_path))
        said = end(process)
        assert process.returncode == 0, said
        assert f"restart 1 of 1, from {BUCKET}/runs/cli/checkpoints/last.ckpt" in said
        there = {child.name for child in RemoteFile.at(f"{BUCKET}/runs/cli").children()}
        assert there >= {"checkpoints", "report.html", "result.json", "config.yaml", "metrics", "logs"}, there
        assert [child.name for child in RemoteFile.at(f"{BUCKET}/runs/cli/checkpoints").children()] == ["last.ckpt"]
        assert not (tmp_path / "outputs" / "s3" / "pipepart-tests" / "runs" / "cli" / "checkpoints").exists()
        process = start(["train", "recipe=mlp", f"resume={BUCKET}/runs/none.ckpt"], tmp_path)
        assert f"resume: there is no checkpoint '{BUCKET}/runs/none.ckpt'" in end(process)
    process = start(["train", "recipe=mlp", "output=memory://a"], tmp_path)
    assert "memory:// is the memory of one process, and this run has 2" in end(process)
