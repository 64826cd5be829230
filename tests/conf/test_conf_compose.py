"""Every group and option composes, every recipe resolves for every strategy, and typos are told at once."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import pytest
from hydra.core.config_store import ConfigStore

from pipepart.cli.config import checked, compose_config
from pipepart.cli.groups import conf_folder, group_options, groups
from pipepart.cli.schema import StrategyConfig, TrainerConfig, schema_of
from pipepart.cli.train import check_run, resolve_devices
from pipepart.cost.cluster import cluster_from, load_cluster
from pipepart.errors import ConfigError, PipepartError
from pipepart.lightning import PipelineStrategy

NEEDS_MORE = {("data", "tokens"): ["data.path=tokens.bin"], ("launcher", "nodes"): ["launcher.address=host:1234"]}
NEEDS_EXTRA = {("launcher", "slurm"), ("launcher", "submitit_local")}
OPTIONS = [(group, option) for group in groups() if group != "cluster" for option in group_options(group)]
FIRST = {min(pair for pair in OPTIONS if pair[0] == group) for group, _ in OPTIONS}
"""Of each group the first option: the quick ones."""


@pytest.mark.parametrize(
    ("group", "option"),
    [pytest.param(*pair, marks=[] if pair in FIRST else [pytest.mark.slow]) for pair in OPTIONS],
)
def test_every_option_composes(group: str, option: str) -> None:
    if (group, option) in NEEDS_EXTRA:
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    overrides = [f"{group}={option}", *NEEDS_MORE.get((group, option), [])]
    if group in ("model", "data"):  # an option of one belongs to a recipe that uses it
        overrides = [f"recipe={_recipe_with(group, option)}", *overrides]
    config = checked(compose_config(overrides))
    config["devices"] = resolve_devices(config)
    check_run(config)


def _recipe_with(group: str, option: str) -> str:
    base = {"gpt_124m": "gpt", "tokens": "text"}.get(option, option)
    for recipe in group_options("recipe"):
        if f"override /{group}: {base}\n" in (conf_folder() / "recipe" / f"{recipe}.yaml").read_text():
            return recipe
    raise AssertionError(f"{group}/{option}.yaml is used by no recipe")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", group_options("recipe"))
@pytest.mark.parametrize(
    "strategy",
    group_options("strategy"),
)
def test_every_recipe_resolves_for_every_strategy(recipe: str, strategy: str) -> None:
    config = checked(compose_config([f"recipe={recipe}", f"strategy={strategy}"]))
    config["devices"] = resolve_devices(config)
    check_run(config)
    assert config["name"] == recipe
    assert config["devices"] == (4 if strategy == "hybrid" else 2)


@pytest.mark.parametrize("cluster", group_options("cluster"))
def test_every_cluster_composes_for_planning(cluster: str) -> None:
    assert compose_config([f"cluster={cluster}"], "plan").cluster.name == cluster


@dataclass
class _Queue:
    """The fields of the SLURM launcher that the configuration sets."""

    _target_: str = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gres: str | None = None
    timeout_min: int = 60
    submitit_folder: str = ""


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [(["trainer=gpu"], 8), (["trainer=cpu"], None), (["trainer=gpu", "hydra.launcher.gpus_per_node=null"], None)],
)
def test_a_queue_is_asked_for_a_gpu_per_process(overrides: list[str], gpus: int | None) -> None:
    if importlib.util.find_spec("hydra_plugins") is None:
        ConfigStore.instance().store("submitit_slurm", _Queue, group="hydra/launcher")
    config = compose_config(["launcher=slurm", "devices=8", "launcher.nodes=2", *overrides], hydra=True)
    assert config.hydra.launcher.gpus_per_node == gpus
    assert (config.hydra.launcher.nodes, config.hydra.launcher.tasks_per_node) == (2, 8)


def test_a_cluster_is_read_from_a_file(tmp_path: Path) -> None:
    text = (conf_folder() / "cluster" / "l4.yaml").read_text().replace("name: l4", "name: mine")
    path = tmp_path / "my-cluster.yaml"
    path.write_text(text)
    config = checked(compose_config([f"cluster={path}"], "plan"))
    assert cluster_from(config["cluster"]) == dataclasses.replace(load_cluster("l4"), name="mine")
    with pytest.raises(ConfigError, match=r"nowhere.yaml"):
        compose_config([f"cluster={tmp_path}/nowhere.yaml"], "plan")
    with pytest.raises(ConfigError, match="cluster is for `pipepart plan`"):
        compose_config([f"cluster={path}"], "train")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("strategy.stagse=4", "did you mean 'stages'?"),
        ("trainer.max_step=4", "did you mean 'max_steps'?"),
        ("model.dpeth=4", "did you mean 'depth'?"),
        ("optimizer.lrr=1", "did you mean 'lr'?"),
        ("recpie=gpt", "did you mean 'recipe'?"),
        ("recipe=gtp", "did you mean 'gpt'?"),
        ("strategy=gpip", "did you mean 'gpipe'?"),
        ("logger.wandb.projct=x", "did you mean 'project'?"),
        ("launcher.nods=2", "did you mean 'nodes'?"),
        ("+model.dpth=3", "did you mean 'depth'?"),
        ("trainer.max_steps=many", "trainer.max_steps: wrong type"),
        ("strategy.stages=[1,2]", "strategy.stages: wrong type"),
        ("seed=abc", "seed: wrong type"),
        ("model.depth=deep", "model.depth: expected int, got 'deep'"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected"),
        ("strategy.stages=[1", "cannot read the overrides"),
        ("data=tokens", "data.path has no value"),
        ("cluster=h100", "pipepart plan"),
        ("model=null", "model is empty"),
    ],
)
def test_mistakes_are_told_with_the_nearest_right_word(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(compose_config([override]))
    assert expected in str(caught.value)


def test_a_choice_of_a_recipe_can_be_taken_away() -> None:
    assert checked(compose_config(["recipe=resnet"]))["scheduler"]["T_max"] == 120
    assert checked(compose_config(["recipe=resnet", "scheduler=null"]))["scheduler"] is None


def test_a_typo_in_a_file_of_the_user_is_told(tmp_path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nname: mine\nstrategy: {shedule: gpipe}\n")
    with pytest.raises(ConfigError, match=r"strategy\.shedule.*did you mean 'schedule'"):
        compose_config(["recipe=mine"], extra=tmp_path)


def test_a_recipe_of_the_user_is_found(tmp_path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nname: mine\ntrainer: {max_steps: 7}\n")
    config = compose_config(["recipe=mine"], extra=tmp_path)
    assert (config.name, config.trainer.max_steps) == ("mine", 7)


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ([], 2),
        (["strategy.stages=4"], 4),
        (["strategy.stages=2", "strategy.replicas=3"], 6),
        (["strategy.replicas=3"], 3),
        (["strategy=replicas"], 2),
        (["devices=8"], 8),
    ],
)
def test_devices_follow_from_what_the_strategy_asks_for(overrides: list[str], devices: int) -> None:
    assert resolve_devices(checked(compose_config(overrides))) == devices


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy.stages=3", "devices=2"],
        ["strategy.schedule=1fb1"],
        ["strategy.stages=0"],
        ["devices=none"],
        ["resume=nowhere.ckpt"],
        ["launcher.nodes=2"],
        ["strategy.plan=nowhere.json"],
    ],
)
def test_impossible_runs_are_refused_before_any_process(overrides: list[str]) -> None:
    def prepare() -> None:
        config = checked(compose_config(overrides))
        config["devices"] = resolve_devices(config)
        check_run(config)

    with pytest.raises(PipepartError):
        prepare()


def test_schemas_are_the_signatures() -> None:
    taken = set(inspect.signature(PipelineStrategy).parameters)
    assert set(StrategyConfig.__dataclass_fields__) <= taken
    assert {"stages", "replicas", "microbatches", "schedule"} <= set(StrategyConfig.__dataclass_fields__)
    assert set(TrainerConfig.__dataclass_fields__) <= set(inspect.signature(L.Trainer).parameters)


def test_schema_of_keeps_names_defaults_and_plain_types() -> None:
    def function(a: int, b: int | str = "auto", c: list[int] | None = None, d: tuple[str, ...] = ("x",)) -> None: ...

    schema = schema_of("S", function)
    made = schema()
    assert (made.a, made.b, made.c, made.d) == ("???", "auto", None, ["x"])
