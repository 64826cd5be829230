"""The gate of the configuration: a file that a stranger wrote runs no code, whatever it names."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipepart.cli import sweep
from pipepart.cli.config import checked, compose_config
from pipepart.cli.main import main
from pipepart.cli.targets import check_hydra_section
from pipepart.errors import ConfigError

MARK = "code-ran"
EVIL = {"_target_": "builtins.open", "file": MARK, "mode": "w"}
FACTORY = {
    "version": 1,
    "handlers": {"x": {"()": "builtins.open", "file": MARK, "mode": "w"}},
    "root": {"handlers": ["x"]},
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipepart.cli.train.start_ranks", start)


def write_recipe(content: dict[str, Any], folder: str = "recipe", name: str = "evil") -> None:
    path = Path("conf") / folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# @package _global_\n" + yaml.safe_dump({"name": "evil", **content}))


@pytest.mark.parametrize(
    "section",
    [
        {"callbacks": {"x": EVIL}},
        {"callbacks": "${model}"},
        {"launcher": EVIL},
        {"launcher": {"inner": EVIL}},
        {"sweeper": EVIL},
        {"sweeper": {"params": {"+hydra.callbacks.x": f"{{_target_: builtins.open, file: {MARK}, mode: w}}"}}},
        {"sweeper": {"params": {"allow": "[subprocess]"}}},
        {"sweeper": {"params": {"model._target_": "os.system"}}},
        {"job": {"env_set": {"LD_PRELOAD": "evil.so"}}},
        {"job": {"env_copy": ["HOME"]}},
        {"job": {"chdir": True}},
        {"job_logging": FACTORY},
        {"hydra_logging": FACTORY},
        {"output_subdir": ".hydra"},
        {"searchpath": ["file:///tmp"]},
        {"overrides": {"task": ["allow=[subprocess]"], "hydra": [f"+hydra.callbacks.x.file={MARK}"]}},
    ],
    ids=lambda section: "-".join([*section, *map(str, next(iter(section.values())))])[:40],
)
def test_hydras_section_of_a_file_runs_nothing(section: dict[str, Any], tmp_path: Path, capsys) -> None:
    write_recipe({"hydra": section})
    assert main(["train", "-m", "--config-dir", "conf", "recipe=evil", "seed=1,2", "logger=none"]) != 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert {path.name for path in tmp_path.iterdir()} <= {"conf", "outputs"}, said.err
    assert not list(tmp_path.rglob(MARK))


def test_a_launcher_of_a_file_is_not_taken(tmp_path: Path, capsys) -> None:
    write_recipe({"defaults": [{"override /hydra/launcher": "mine"}]})
    folder = Path("conf/hydra/launcher")
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(yaml.safe_dump(EVIL))
    assert main(["train", "-m", "--config-dir", "conf", "recipe=evil", "seed=1,2"]) == 2
    assert "known: basic" in capsys.readouterr().err
    assert not list(tmp_path.rglob(MARK))


def test_a_run_that_is_no_sweep_does_not_use_hydras_section(tmp_path: Path) -> None:
    write_recipe({"hydra": {"callbacks": {"x": EVIL}, "job_logging": FACTORY}})
    assert main(["train", "--config-dir", "conf", "recipe=evil", "--cfg", "job"]) == 0
    assert not list(tmp_path.rglob(MARK))


@pytest.mark.parametrize("allow", [["subprocess"], ["os"], ["${model._target_}"], "${optimizer.betas}"])
def test_a_file_cannot_allow_packages(allow: Any) -> None:
    write_recipe({"allow": allow, "model": {"_target_": "subprocess.Popen"}})
    with pytest.raises(ConfigError, match="allow"):
        checked(compose_config(["recipe=evil"], extra=Path("conf")))


def test_the_command_line_can_allow_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gate_package.py").write_text("from recipes.mlp import MLPModule\nclass Mine(MLPModule): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    write_recipe({"model": {"_target_": "gate_package.Mine"}})
    with pytest.raises(ConfigError, match=r"on the command line: allow=\[gate_package\]"):
        checked(compose_config(["recipe=evil"], extra=Path("conf")))
    words = ["recipe=evil", "model=mlp", "model._target_=gate_package.Mine", "allow=[gate_package]"]
    assert checked(compose_config(words, extra=Path("conf")))["allow"] == ["gate_package"]
    with pytest.raises(ConfigError, match="list of names of packages"):
        compose_config(["allow=${name}"])
    with pytest.raises(ConfigError, match="configuration file"):
        compose_config(["seed=2", "allow=[os]"], trusted=["seed=2"])


@pytest.mark.parametrize(
    "override",
    [
        "+callbacks.x={_target_:functools.partial,func:os.system}",
        "+callbacks.x={_target_:hydra.utils.instantiate}",
        "+callbacks.x={_target_:lightning.pytorch.cli.LightningCLI}",
        "+callbacks.x={_target_:lightning.pytorch.Trainer}",
        "+callbacks.x=${oc.create:'{_target_: os.system}'}",
        "+callbacks.x={_target_:'recipes.gpt.GPTModule.load_from_checkpoint',checkpoint_path:x,weights_only:false}",
        "+callbacks.x={_target_:recipes.mlp.MLPModule.forward}",
        "+callbacks.x={_target_:torch.load,f:x,weights_only:false}",
    ],
)
def test_callables_that_run_code_are_not_built(override: str) -> None:
    with pytest.raises(ConfigError, match="_target_"):
        checked(compose_config([override]))


def test_commands_of_a_queue_are_for_the_command_line() -> None:
    own = {"launcher": {"_target_": "Slurm", "setup": None, "partition": None, "python": None}}
    check_hydra_section({"launcher": {**own["launcher"], "partition": "gpu"}}, own, {"partition": "gpu"})
    for found in ({"setup": ["touch code"]}, {"python": "/tmp/evil"}, {"srun_args": ["--x"]}):
        with pytest.raises(ConfigError, match=r"hydra\.launcher\.\w+ is set by a configuration file"):
            check_hydra_section({"launcher": {**own["launcher"], **found}}, own, {})
    with pytest.raises(ConfigError, match="control characters"):
        check_hydra_section(own, own, {"partition": "gpu\ntouch code"})


@pytest.mark.slow
def test_a_sweep_of_a_file_runs_and_hides_secrets(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    ran = []

    def run(config: dict[str, Any], said: list[str]) -> dict[str, Any]:
        ran.append(config["optimizer"]["lr"])
        return {"folder": config["output"], "metrics": {"loss": 0.5}}

    monkeypatch.setattr(sweep, "run", run)
    write_recipe({"hydra": {"mode": "MULTIRUN", "sweeper": {"params": {"optimizer.lr": "0.1,0.2"}}}}, "sweep", "mine")
    words = ["+logger.wandb.notes={hfToken: planted-in-a-sweep}", "hydra.sweep.dir=runs"]
    assert main(["train", "--config-dir", "conf", "recipe=mlp", "sweep=mine", *words]) == 0
    assert ran == [0.1, 0.2]
    said = capsys.readouterr()
    assert "0.1" in said.out and "planted" not in said.out + said.err
    file = Path("runs/multirun.yaml")
    assert "optimizer.lr" in file.read_text() and "planted" not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
