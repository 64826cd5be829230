"""Numbers outside of their ranges are refused before any process is started."""

from __future__ import annotations

import copy
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pipepart.cli.config import checked, compose_config
from pipepart.cli.main import main
from pipepart.cli.schema import RANGES
from pipepart.cli.train import ready
from pipepart.errors import PipepartError
from pipepart.lightning.strategy_options import StrategyOptions

HUGE = str(10**30)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    for module in ("train", "bench", "dry_runs"):
        monkeypatch.setattr(f"pipepart.cli.{module}.start_ranks", start)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"strategy.stages={HUGE}", "strategy.stages must be a finite number below 2**63"),
        ("strategy.stages=70000", "stages must be a whole number of at most 65536 or 'auto', got 70000"),
        ("strategy.stages=2000", "at most 1024 processes on one machine"),
        ("devices=1000000", "devices must be a number of at most 65536"),
        ("strategy.timeout=0", "timeout must be a number above 0, got 0"),
        ("strategy.timeout=-3", "timeout must be a number above 0"),
        ("strategy.timeout=nan", "strategy.timeout must be a finite number"),
        ("strategy.timeout=inf", "strategy.timeout must be a finite number"),
        ("strategy.chunks=-1", "chunks must be a whole number of at least 1 or 'auto', got -1"),
        ("strategy.slack=-1", "slack must be a whole number of at least 0"),
        ("strategy.replicas=0", "replicas must be a whole number of at least 1"),
        ("strategy.memory_limit=0", "memory_limit must be a number of at least 1 or None"),
        ("optimizer.lr=nan", "optimizer.lr must be a finite number"),
        ("optimizer.lr=-1", "optimizer.lr must be a number of at least 0"),
        ("optimizer.betas=[0.9,2.0]", "optimizer: torch.optim.AdamW refuses its arguments"),
        ("launcher.nodes=0", "launcher.nodes must be a number of at least 1"),
        ("launcher.wait=-1", "launcher.wait must be a number above 0"),
        ("launcher.failures=-2", "launcher.failures must be a number of at least -1"),
        ("launcher.spare_every=0", "launcher.spare_every must be a number of at least 1"),
        ("launcher.spare_state=disk", "launcher.spare_state must be null or neighbour, got 'disk'"),
        ("launcher.spare_state=neighbour", "it needs launcher=nodes with at least two machines"),
        ("launcher.lost_replica=wait", "launcher.lost_replica must be null or continue, got 'wait'"),
        (
            "launcher.lost_replica=continue",
            "launcher.lost_replica=continue needs strategy.replicas, at least 2, got 'auto'",
        ),
        ("launcher.engine=slurm", "launcher.engine must be torch or ray, got 'slurm'"),
        ("seed=-1", "seed must be a number of at least 0"),
        ("trainer.max_steps=-5", "trainer.max_steps must be a number of at least -1"),
        (f"model.width={HUGE}", "model.width must be a finite number below 2**63"),
        (f"seed={'9' * 5000}", "cannot read the overrides"),
        (f"+model.x={'[' * 3000}", "cannot read the overrides"),
        ("output=file", "is a file; choose another folder"),
        ("output=file/below", "is a file; choose another folder"),
        ("strategy.schedule=far.csv", "micro-batch 999999999"),
        ("resume=.", "expected a file or the folder of a sharded checkpoint"),
    ],
    ids=lambda text: text[:28],
)
def test_numbers_out_of_range(override: str, expected: str, capsys) -> None:
    Path("file").write_text("")
    Path("far.csv").write_text("0F0,0B0,0F999999999\n1F0,1B0\n")
    assert main(["train", override]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert len(said.strip().splitlines()) == 1 and len(said) < 600


def test_a_sharded_checkpoint_is_a_folder() -> None:
    Path("last.ckpt").mkdir()
    Path("last.ckpt/rest.pt").write_bytes(b"")
    assert ready(checked(compose_config(["resume=last.ckpt"])))["resume"] == "last.ckpt"


def test_bench_of_schedules_has_ranges(capsys) -> None:
    assert main(["bench", "schedules", "--stages", HUGE]) == 2
    assert "from 1 to 1024" in capsys.readouterr().err


numbers = st.one_of(
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 10**30, math.nan, math.inf, -math.inf, 1e308, 5e-324]),
    st.floats(),
)
values = st.one_of(
    numbers,
    st.none(),
    st.booleans(),
    st.text(max_size=8),
    st.sampled_from(["auto", "gpipe", "x.csv", "\0.csv", b"", object]),
    st.recursive(
        numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(given_values=st.dictionaries(st.sampled_from(StrategyOptions.names()), values, min_size=1, max_size=3))
def test_options_are_refused_by_one_of_our_errors(given_values: dict[str, Any]) -> None:
    try:
        options = StrategyOptions(**given_values)
    except PipepartError:
        return
    for name in ("stages", "replicas", "microbatches", "chunks"):
        assert getattr(options, name) == "auto" or 1 <= getattr(options, name) <= 65_536
    assert 0 < options.timeout < math.inf


def test_a_number_that_cannot_be_printed_is_refused() -> None:
    for name in StrategyOptions.names():
        if name not in ("batch_dim", "example_batch"):  # they take any number
            with pytest.raises(PipepartError):
                StrategyOptions(**{name: 10**5000})
    with pytest.raises(PipepartError, match="seed must be a finite number"):
        checked(OmegaConf.create({**base(), "seed": 10**5000}))


@cache
def base() -> dict[str, Any]:
    return checked(compose_config(["recipe=mlp"]))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted({*RANGES, "strategy.stages", "strategy.timeout", "model.width"})), value=numbers)
def test_numbers_of_the_configuration_are_refused_by_one_of_our_errors(key: str, value: Any) -> None:
    config = copy.deepcopy(base())
    *above, last = key.split(".")
    section = config
    for name in above:
        section = section[name]
    section[last] = value
    try:
        ready(checked(OmegaConf.create(config)))
    except PipepartError:
        return
    assert math.isfinite(value)


@pytest.mark.parametrize(
    ("section", "value", "expected"),
    [
        ("optimizer", "adam", "optimizer must be a mapping with a _target_, got 'adam'"),
        ("optimizer", {"lr": 1.0}, "optimizer must be a mapping with a _target_"),
        ("allow", [[]], "allow must be a list of names of packages"),
    ],
)
def test_sections_of_a_wrong_type(section: str, value: Any, expected: str) -> None:
    with pytest.raises(PipepartError, match=expected):
        checked(OmegaConf.create({**base(), section: value}))
