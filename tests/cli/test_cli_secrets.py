"""Secrets by name, by value and by form reach neither files nor the terminal."""

from __future__ import annotations

import runpy
import stat
from pathlib import Path

import pytest
from cli_programs import SHORT, end, path_with, start

from pipepart.cli.main import main
from pipepart.cli.processes import leave_reason
from pipepart.cli.sweep import summary
from pipepart.secrets import HIDDEN, clean, is_secret, redacted, redacted_override


@pytest.mark.parametrize(
    "name",
    [
        "token", "hfToken", "HF_TOKEN", "tokens", "pwd", "api-key", "apiKey", "APIKey", "apikey", "AWS_SECRET_ACCESS_KEY",
        "password", "db.password", "client_secret", "credentials", "wandb_api_key", "myToken2", "GITHUB_PAT", "auth",
        "API_KEY_V2", "token_v3", "Authorization", "session_cookie", "passcode",
    ],
)  # fmt: skip
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "max_tokens",
        "pad_token",
        "key",
        "keys",
        "path",
        "monkey",
        "author",
        "tokens_per_batch",
        "passes",
        "",
    ],
)
def test_other_names(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "key",
    [
        "hf_" + "a1B2" * 6, "sk-proj-" + "a1B2" * 6, "ghp_" + "a1B2" * 9, "github_pat_" + "a1B2" * 6, "AKIA" + "A1B2" * 4,
        "AIza" + "a1B2_" * 7, "xoxb-1234567890-abcdef", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "0123456789abcdef" * 2 + "01234567", "glpat-" + "a1B2" * 5,
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    ],
    ids=lambda key: key[:6],
)  # fmt: skip
def test_keys_of_known_services(key: str) -> None:
    assert clean(f"use {key}.") == f"use {HIDDEN}."
    assert redacted({"note": [f"x={key}"]}) == {"note": [f"x={HIDDEN}"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+model={size: 3, hfToken: abc, b: 2}", "+model={size: 3, hfToken: ***, b: 2}"),
        ("x={a: {b: [{pwd: 'q, }'}, 1]}, n: 2}", "x={a: {b: [{pwd: ***}, 1]}, n: 2}"),
        ("x={'api-key': \"a b\"}", "x={'api-key': ***}"),
        ("x={credentials: {user: me, name: you}, y: 1}", "x={credentials: ***, y: 1}"),
        ("model.token=a,b", "model.token=***"),
        ("+logger.wandb.tokens=[a1,b2]", "+logger.wandb.tokens=***"),
        ("data.max_tokens=512", "data.max_tokens=512"),
        ("data.tokens=512", "data.tokens=512"),
        ("data=tokens", "data=tokens"),
        ("url=https://me:word@host/x", "url=https://***@host/x"),
        ("recipe=gpt", "recipe=gpt"),
    ],
)
def test_overrides(text: str, expected: str) -> None:
    assert redacted_override(text) == expected


def test_values_that_were_found_by_name_are_hidden_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_PASSWORD", "from-the-environment")
    assert redacted(
        {"service": {"pwd": "found-by-name"}, "credentials": {"user": "somebody-else"}, "n": {"tokens": 7}}
    ) == {
        "service": {"pwd": HIDDEN},
        "credentials": {"user": HIDDEN},
        "n": {"tokens": 7},
    }
    assert clean("a found-by-name b somebody-else c from-the-environment") == f"a {HIDDEN} b {HIDDEN} c {HIDDEN}"


def test_the_folder_of_the_shell_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell keeps the working folder in PWD, which has the name of a password."""
    monkeypatch.setenv("PWD", "/home/somebody/project")
    monkeypatch.setenv("OLDPWD", "/home/somebody")
    monkeypatch.setenv("DB_PWD", "correct horse")
    assert clean("/home/somebody/project/outputs correct horse") == f"/home/somebody/project/outputs {HIDDEN}"


def test_errors_do_not_echo_secrets(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setenv("PLANTED_PASSWORD", "planted-in-the-environment")
    wrong = [
        ["trainer.max_steps=${oc.env:PLANTED_PASSWORD}"],
        ["model.depth=${oc.env:PLANTED_PASSWORD}"],
        ["+model.token=planted-by-name", "model.depth=planted-by-name"],
        ["strategy.stages={pwd: planted-in-a-mapping}"],
        ["resume=${oc.env:PLANTED_PASSWORD}"],
        ["output=runs/${oc.env:PLANTED_PASSWORD}"],
        ["name=${oc.env:PLANTED_PASSWORD}"],
        ["+a={pwd: planted-in-a-mapping"],
    ]
    for words in wrong:
        assert main(["train", *words]) == 2
        assert "planted" not in capsys.readouterr().err
    leave_reason(ValueError("planted-in-the-environment\x1b[2J"), 0, tmp_path)
    (tmp_path / "own.py").write_text("def run():\n    raise ValueError('hf_planted0123456789abcdef')\n")
    own = runpy.run_path(str(tmp_path / "own.py"))
    with pytest.raises(ValueError, match="hf_planted") as failed:
        own["run"]()
    leave_reason(failed.value, 1, tmp_path)
    for file in tmp_path.glob("*-rank*"):
        assert "planted" not in file.read_text()
    assert "own.py:2 in run: raise ValueError" in (tmp_path / "failure-rank1.json").read_text()
    text = summary(
        [(["model.token=planted-a"], {"error": "planted-in-the-environment"}), (["model.token=planted-b"], {})],
        tmp_path,
    )
    assert "planted" not in text + (tmp_path / "summary.csv").read_text()


RECIPE = """
# @package _global_
defaults:
  - override /model: mlp
  - override /data: spirals
  - override /optimizer: adam
name: planted
model:
  _target_: planting.Planting
  hfToken: planted-in-a-file
"""
MODULE = """
import logging, sys, warnings
from recipes.mlp import MLPModule

class Planting(MLPModule):
    def __init__(self, optimizer, hfToken=None, nested=None, plain=None, note=None, tokens=None, **more):
        super().__init__(optimizer=optimizer, **more)
        self.values = [hfToken, nested["pwd"], nested["deep"][0]["api_key"], plain, note, tokens[0]]

    def on_train_start(self):
        for logger in self.loggers:
            logger.log_hyperparams({"apiKey": self.values[0], "inner": {"note": self.values[3]}})
        for value in self.values:
            print("printed", value, flush=True)
            print("printed", value, file=sys.stderr, flush=True)
            warnings.warn(f"warned {value}")
            logging.getLogger("mine").warning("logged %s", value)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_leaves_no_secret_behind(tmp_path: Path) -> None:
    """Secrets are planted in every way, and all files and all output of a real run are searched for them."""
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "planted.yaml").write_text(RECIPE)
    (tmp_path / "planting.py").write_text(MODULE)
    words = [
        "train", "--config-dir", "conf", "recipe=planted", "allow=[planting]", *SHORT, "logger=wandb", "output=runs/one",
        "+model.nested={user: me, pwd: planted-in-a-mapping, deep: [{api_key: planted-in-a-list}]}",
        "+model.plain=${oc.env:SERVICE_PASSWORD}", "+model.note=hf_planted0123456789abcdef",
        "+model.tokens=[planted-in-tokens]", "+logger.wandb.notes=${oc.env:SERVICE_PASSWORD}",
    ]  # fmt: skip
    process = start(words, tmp_path, SERVICE_PASSWORD="planted-in-the-environment", PYTHONPATH=path_with(tmp_path))
    said = end(process)
    assert process.returncode == 0, said
    assert "printed ***" in said and "planted-" not in said and "hf_planted" not in said
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.csv", "report.html"} <= {path.name for path in files}
    leaks = [path for path in files if b"planted-in" in path.read_bytes() or b"hf_planted" in path.read_bytes()]
    assert not leaks
    assert "pwd: ***" in (tmp_path / "runs/one/config.yaml").read_text().splitlines()[0]
    for path in files:
        if path.name in ("config.yaml", "hparams.yaml", "multirun.yaml") and "wandb" not in path.parts:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "runs/one/wandb").stat().st_mode) == 0o700


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sharded_run_is_resumed(tmp_path: Path) -> None:
    for words in (
        ["output=runs/one"],
        ["output=runs/two", "resume=runs/one/checkpoints/last.ckpt", "trainer.max_steps=9"],
    ):
        process = start(["train", "recipe=mlp", *SHORT, "strategy.sharded=true", *words], tmp_path)
        said = end(process)
        assert process.returncode == 0, said
    assert (tmp_path / "runs/one/checkpoints/last.ckpt").is_dir()
    assert "step 7/9" in said
