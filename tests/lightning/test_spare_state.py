"""The state of a run in the memory of its hosts: whole without any one host, and equal to a checkpoint of the same step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from realistic import build
from support.ranks import RanksFailed, run_ranks
from watching import QUIET, Notes

from pipepart import PipelineStrategy
from pipepart.cli.spare_state import SpareState
from pipepart.lightning import WeightEMA
from pipepart.lightning.checkpoint_files import CheckpointError
from pipepart.lightning.spare_parts import load_spare, neighbour
from pipepart.spare_files import is_spare, listed, newest_whole, parts_of, spare_folder, step_of

EVERY = 2


def _fit(
    folder: str, stages: int, hosts: list[int], steps: int, resume: dict[int, str] | str | None, **options: Any
) -> Any:
    """Train as a rank of a host, with a folder for each host. `resume` may differ by host."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    host = hosts[rank]
    os.environ.update(GROUP_RANK=str(host), LOCAL_RANK=str(hosts[:rank].count(host)))
    memory = Path(folder, f"pipepart-spare-{host}")
    memory.mkdir(parents=True, exist_ok=True)
    module, train, _ = build("gpt")
    notes = Notes()
    saves = ModelCheckpoint(
        folder, "plain-{step}", every_n_train_steps=EVERY, save_top_k=-1, auto_insert_metric_name=False
    )
    callbacks = [notes, *options.pop("callbacks", []), *([saves] if resume is None else [])]
    strategy = PipelineStrategy(stages=stages, microbatches=3, sync=options.pop("sync", "mean"))
    trainer = L.Trainer(
        strategy=strategy, devices=len(hosts), max_steps=steps, max_epochs=3, callbacks=callbacks,
        **{**QUIET, "default_root_dir": folder, "enable_checkpointing": resume is None, "limit_val_batches": 0, **options},
    )  # fmt: skip
    trainer.callbacks.append(SpareState(memory, EVERY))  # as `pipepart train` does
    trainer.fit(module, train, ckpt_path=resume[host] if isinstance(resume, dict) else resume)
    return {"losses": notes.losses, "rates": notes.rates, "step": trainer.global_step}


def _state(folder: Path, hosts: list[int]) -> str:
    return newest_whole([listed(folder / f"pipepart-spare-{host}") for host in hosts])


def _equal(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert set(one) == set(other), where
        for key, value in one.items():
            _equal(value, other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other)):
            _equal(a, b, f"{where}[{number}]")
    else:
        assert one == other, where


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "hosts", "left", "sync"),
    [
        (2, [0, 0, 1, 1], [0, 0], "mean"),
        (2, [0, 0, 1, 1], [1, 1], "sharded"),
        (4, [0, 1, 2, 3], [0, 2], "mean"),
    ],
    ids=["2 hosts, a replica each", "2 hosts, divided optimizer states", "4 hosts, parts come from others"],
)
def test_the_hosts_that_are_left_go_on_as_from_a_checkpoint(
    tmp_path: Path, stages: int, hosts: list[int], left: list[int], sync: str
) -> None:
    ran = run_ranks(4, _fit, str(tmp_path), stages, hosts, 5, None, sync=sync, callbacks=[WeightEMA(0.9)])[0]
    assert ran["step"] == 5
    for host in set(hosts) - set(left):
        shutil.rmtree(tmp_path / f"pipepart-spare-{host}")
    name = _state(tmp_path, sorted(set(left)))
    assert step_of(name) == 4, "at most `every` steps are lost"
    plain = str(tmp_path / "plain-4.ckpt")
    mine = {host: str(tmp_path / f"pipepart-spare-{host}" / name) for host in left}
    if len(set(left)) == 1:  # all parts are on this host
        whole = load_spare(mine[left[0]], None)
        whole.pop("callbacks"), (expected := torch.load(plain, weights_only=True)).pop("callbacks")
        _equal(whole, expected)
    else:
        assert all(len(parts_of(Path(path))) == 2 for path in mine.values())
    options = {"callbacks": [WeightEMA(0.9)]}
    by_hand = run_ranks(2, _fit, str(tmp_path / "hand"), 2, left, 7, plain, default_root_dir=str(tmp_path), **options)[
        0
    ]
    again = run_ranks(2, _fit, str(tmp_path), 2, left, 7, mine, **options)[0]
    assert again == by_hand
    assert again["step"] == 7 and len(again["losses"]) == 3
    assert step_of(_state(tmp_path, sorted(set(left)))) == 6, "the states before are removed"
    assert all(len(list((tmp_path / f"pipepart-spare-{host}").glob("step-*"))) == 1 for host in left)


@pytest.mark.slow
def test_averages_in_the_place_of_weights_are_refused(tmp_path: Path) -> None:
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="new in Lightning 2.6")
    with pytest.raises(
        RanksFailed, match=r"launcher\.spare_state=neighbour keeps the weights in parts, and WeightAveraging"
    ):
        run_ranks(2, _fit, str(tmp_path), 2, [0, 1], 2, None, callbacks=[averaging.WeightAveraging()])


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["local", "ring"])
def test_replicas_with_parameters_of_their_own_are_refused(tmp_path: Path, sync: str) -> None:
    with pytest.raises(RanksFailed, match=rf"launcher\.spare_state=neighbour is not supported with sync='{sync}'"):
        run_ranks(2, _fit, str(tmp_path), 1, [0, 1], 2, None, sync=sync)


def test_a_state_without_a_part_is_not_chosen() -> None:
    name = "step-000000020-0123abcd"
    first, second = (
        json.dumps({name: ["part-0-of-2"]}),
        json.dumps({name: ["part-1-of-2"], "step-000000010-0123abcd": []}),
    )
    assert newest_whole([first, second]) == name
    assert newest_whole([first, ""]) == newest_whole([]) == ""
    older = json.dumps({"step-000000010-0123abcd": ["part-0-of-1"], name: ["part-1-of-3", "part-1-of-2"]})
    assert newest_whole([first, older]) == "step-000000010-0123abcd"
    for wrong in (
        "{",
        "[]",
        '{"../../etc": ["part-0-of-1"]}',
        '{"step-000000020-0123abcd": 3}',
        "null",
        "x" * 2_000_000,
    ):
        assert newest_whole([wrong]) == ""


def test_neighbours_are_on_another_host() -> None:
    assert [neighbour(rank, [0, 0, 1, 1]) for rank in range(4)] == [2, 3, 0, 1]
    assert [neighbour(rank, [0, 0, 1, 2]) for rank in range(4)] == [2, 2, 3, 0]
    assert neighbour(0, [5, 5]) is None


def test_the_folder_of_a_run_ends_with_it_or_with_the_next_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pipepart.spare_files._MEMORY", str(tmp_path))
    program = (
        "import os, sys\nfrom pipepart import spare_files\nspare_files._MEMORY = sys.argv[1]\n"
        "with spare_files.spare_folder() as folder:\n    print(folder, flush=True)\n    os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=240)
    left = Path(done.stdout.strip())
    assert done.returncode == 9 and left.exists(), done.stderr
    with spare_folder() as folder:
        assert not left.exists()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert os.environ["PIPEPART_SPARE_FOLDER"] == str(folder)
        with spare_folder() as second:
            assert folder.exists() and second != folder, "a run that goes on keeps its folder"
    assert not folder.exists()
    assert "PIPEPART_SPARE_FOLDER" not in os.environ


def test_a_state_that_no_host_has(tmp_path: Path) -> None:
    path = tmp_path / "pipepart-spare-1" / "step-000000020-0123abcd"
    assert is_spare(path) and not is_spare(tmp_path / "step-000000020-0123abcd") and not is_spare("s3://a/last.ckpt")
    with pytest.raises(CheckpointError, match="in the memory of no host"):
        load_spare(path, None)
