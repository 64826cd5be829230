"""Runs that lose a host and go on with those that are left, by themselves, as if they were resumed by hand at that shape."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from host_jobs import both_ended, on_each, train_on
from support.hosts import made_hosts

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
WORDS = ["recipe=mlp", "logger=none", "strategy.stages=2", "strategy.timeout=60", "trainer.max_steps=1200"]
SPARE = 20  # steps between two states in memory
SHORT = 300  # steps of a run that keeps them
LONG = 8000  # steps in which a host can start
EVERY = 400  # steps between two checkpoints


def _weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return found


def test_a_lost_host_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    last, kept = tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "kept.ckpt"
    with made_hosts(2) as hosts:
        words = [*WORDS, f"trainer.val_check_interval={EVERY}", f"output={tmp_path / 'run'}"]
        words += ["launcher.failures=1", "launcher.min_nodes=1"]
        programs = train_on(hosts, f"{hosts[0].address}:29401", 2, words, tmp_path)
        deadline = time.monotonic() + 300
        while not last.exists():
            assert programs[0].poll() is None, programs[0].communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        hosts[1].end()
        shutil.copy(last, kept)
        (said,) = both_ended(programs[:1])
        assert programs[0].returncode == 0, said
        # The same by hand, on the host that is left.
        words = [*WORDS, f"trainer.val_check_interval={2 * EVERY}", f"output={tmp_path / 'hand'}", "devices=2"]
        words += [f"resume={kept}", "trainer.accumulate_grad_batches=2"]
        programs = on_each(hosts[:1], [["-m", "pipepart.cli", "train", *words]], tmp_path)
        (by_hand,) = both_ended(programs)
        assert programs[0].returncode == 0, by_hand
    assert re.search(r"restart 1 of 1, from run/checkpoints/last\.ckpt", said), said
    assert (
        "1 x 2 (replicas x stages) in place of 2 x 2; each step takes 2 batches, so that its samples stay the same"
        in said
    )
    result, expected = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "hand"))
    assert (result["replicas"], result["stages"], result["steps"]) == (1, 2, 1200)
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    for name, value in _weights(tmp_path / "hand" / "checkpoints" / "last.ckpt").items():
        torch.testing.assert_close(_weights(last)[name], value, rtol=1e-4, atol=1e-6)


def test_a_lost_host_costs_the_steps_since_the_last_state_in_memory(tmp_path: Path) -> None:
    """The checkpoints of the same steps on disk are for the comparison only."""
    saved = tmp_path / "run" / "checkpoints"
    words = [*WORDS[:-1], f"trainer.max_steps={SHORT}", "callbacks.checkpoint.save_top_k=-1"]
    with made_hosts(2) as hosts:
        own = [f"trainer.val_check_interval={SPARE}", f"output={tmp_path / 'run'}", "launcher.failures=1"]
        own += ["launcher.min_nodes=1", "launcher.spare_state=neighbour", f"launcher.spare_every={SPARE}"]
        programs = train_on(hosts, f"{hosts[0].address}:29401", 2, [*words, *own], tmp_path)
        deadline = time.monotonic() + 300
        while not list(saved.glob("*step=*.ckpt")):
            assert programs[0].poll() is None, programs[0].communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (saved / "last.ckpt").unlink(missing_ok=True)
        hosts[1].end()
        (said,) = both_ended(programs[:1])
        assert programs[0].returncode == 0, said
        found = re.search(r"going on after step (\d+), from the state in the memory of the hosts", said)
        assert found is not None, said
        (kept,) = saved.glob(f"*step={found[1]}.ckpt")
        own = [
            f"trainer.val_check_interval={2 * SPARE}",
            f"output={tmp_path / 'hand'}",
            "devices=2",
            f"resume='{kept}'",
        ]
        own += ["trainer.accumulate_grad_batches=2"]
        programs = on_each(hosts[:1], [["-m", "pipepart.cli", "train", *words, *own]], tmp_path)
        (by_hand,) = both_ended(programs)
        assert programs[0].returncode == 0, by_hand
        left = hosts[0].run("ls", "/dev/shm").split()
    result, expected = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "hand"))
    assert (result["replicas"], result["stages"], result["steps"]) == (1, 2, SHORT)
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    mine = _weights(saved / "last.ckpt")
    for name, value in _weights(tmp_path / "hand" / "checkpoints" / "last.ckpt").items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)
    assert not [name for name in left if name.startswith("pipepart")], "nothing stays in memory"


def test_a_host_that_comes_late_joins_at_the_next_checkpoint(tmp_path: Path) -> None:
    """A run that has begun with one host of two ends with both, after all of its steps."""
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with made_hosts(2) as hosts:
        words = [*WORDS[:-1], f"trainer.max_steps={LONG}", f"trainer.val_check_interval={EVERY}", "launcher.wait=20"]
        words += [f"output={tmp_path / 'run'}"]
        words += ["launcher=nodes", "launcher.nodes=2", f"launcher.address={hosts[0].address}:29401", "devices=2"]
        words += ["launcher.min_nodes=1"]
        (first,) = on_each(hosts[:1], [["-m", "pipepart.cli", "train", *words]], tmp_path)
        deadline = time.monotonic() + 300
        while not last.exists():
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (second,) = on_each(hosts[1:], [["-m", "pipepart.cli", "train", *words]], tmp_path)
        said, late = both_ended([first, second])
        assert (first.returncode, second.returncode) == (0, 0), said + late
    assert "1 x 2 (replicas x stages) in place of 2 x 2" in said, said
    assert "more machines have come: going on with them, from run/checkpoints/last.ckpt" in said, said
    assert "a run goes on without this machine" in late, late
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["replicas"], result["stages"], result["steps"]) == (2, 2, LONG)
    assert not list((tmp_path / "run" / "logs").glob("machines-wait"))
