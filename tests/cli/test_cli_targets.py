"""Configuration can build what it may, and nothing else; secrets are not written."""

from __future__ import annotations

import sys
from typing import Any, Literal

import pytest

from pipepart.cli.config import checked, compose_config, written
from pipepart.cli.targets import build, check_targets, locate
from pipepart.errors import ConfigError
from pipepart.secrets import HIDDEN, redacted, redacted_override
from pipepart.values import fits


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.eval",
        "torch.load",
        "torch.hub.load",
        "recipes.text.np.load",
        "recipes.gpt.torch.load",
        "pipepart.cli.main.main",
        "pipepart.cli.main.sys.exit",
        "lightning.pytorch.utilities.os.system",
        "lightning.fabric.utilities.seed.seed_everything",
        "recipes.mlp.__builtins__.exec",
        "recipes.optimizers.torch.optim.sgd.torch.load",
        "recipesx.evil",
        "functools.partial",
        "hydra.utils.instantiate",
        "lightning.pytorch.cli.LightningCLI",
        "lightning.pytorch.Trainer",
        "recipes.gpt.GPTModule.load_from_checkpoint",
        "recipes.mlp.MLPModule.forward",
        "recipes.optimizers.optimized",
        "pipepart.cli.fit.fit",
        "",
        None,
    ],
)
def test_only_what_allowed_packages_define_is_built(name: Any) -> None:
    with pytest.raises(ConfigError, match="_target_"):
        locate(name)


@pytest.mark.parametrize(
    "name",
    [
        "recipes.gpt.GPTModule",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.OneCycleLR",
        "lightning.pytorch.callbacks.EarlyStopping",
    ],
)
def test_what_is_allowed_is_found(name: str) -> None:
    assert locate(name).__name__ == name.rsplit(".", 1)[-1]


def test_a_target_hidden_deep_in_the_configuration_is_found() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.a\[0\]\.b\._target_"):
        check_targets({"callbacks": {"a": [{"b": {"_target_": "os.system"}}]}})
    with pytest.raises(ConfigError, match="allowed packages"):
        checked(compose_config(["+callbacks.evil={_target_:os.system,command:true}"]))


def test_packages_of_the_user_are_added_by_a_key(tmp_path, monkeypatch) -> None:
    (tmp_path / "mypackage.py").write_text("class Thing:\n    def __init__(self, size: int = 1): self.size = size\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"allow=\[mypackage\]"):
        locate("mypackage.Thing")
    assert build({"_target_": "mypackage.Thing", "size": 3}, ["mypackage"]).size == 3
    sys.modules.pop("mypackage")


def test_missing_names_are_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'GPTModule'"):
        locate("recipes.gpt.GPTModul")
    with pytest.raises(ConfigError, match="no 'nowhere'"):
        locate("recipes.nowhere.Thing")


def test_partial_and_nested_targets() -> None:
    made = build({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5})
    assert made.keywords == {"lr": 0.5}


@pytest.mark.parametrize(
    ("value", "annotation", "right"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        ("1", float, False),
        (None, int | None, True),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False),
        ([1, 2], list[int], True),
        ([1, "2"], list[int], False),
        ([1, 2], tuple[int, int], True),
        ([1], tuple[int, int], False),
        ([1, 2, 3], tuple[int, ...], True),
        ({"a": 1}, dict[str, int], True),
        (3, dict, False),
        (object(), Any, True),
    ],
)
def test_values_fit_their_types(value: Any, annotation: Any, right: bool) -> None:
    assert fits(value, annotation) is right


def test_secrets_are_left_out_wherever_configuration_is_written() -> None:
    key = "a" * 8 + "0123456789abcdef" * 2
    config = {
        "logger": {"wandb": {"api_key": "k", "project": "p", "tokenizer": "bytes"}},
        "hf_token": "t",
        "password": 5,
        "token": None,
        "note": f"use {key} or hf_abcdefghijklmnopqrst",
        "url": "https://me:secret@host/path",
        "list": [{"secret": "x"}],
    }
    clean = redacted(config)
    assert clean["logger"]["wandb"] == {"api_key": HIDDEN, "project": "p", "tokenizer": "bytes"}
    assert (clean["hf_token"], clean["password"], clean["token"]) == (HIDDEN, HIDDEN, None)
    assert clean["note"] == f"use {HIDDEN} or {HIDDEN}"
    assert clean["url"] == f"https://{HIDDEN}@host/path"
    assert clean["list"] == [{"secret": HIDDEN}]
    assert redacted_override("+logger.wandb.api_key=abc") == f"+logger.wandb.api_key={HIDDEN}"
    assert redacted_override("trainer.max_steps=3") == "trainer.max_steps=3"
    text = written(checked(compose_config(["+logger.wandb.api_key=abcdef"])))
    assert "abcdef" not in text
    assert HIDDEN in text


def test_names_of_before_lead_to_where_things_are_now() -> None:
    """A configuration that an earlier version has written can be read."""
    import pipepart
    from pipepart.lightning.tracking import SafeWandbLogger

    assert locate("pipepart.strategy.monitor.PipelineMonitor") is pipepart.PipelineMonitor
    assert locate("pipepart.strategy.PipelineMonitor") is pipepart.PipelineMonitor
    assert locate("pipepart.report.tracking.SafeWandbLogger") is SafeWandbLogger
