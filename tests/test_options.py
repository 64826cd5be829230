"""Options are declared once: every signature, the configuration and the tables of the docs are held against `Options`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning.pytorch.strategies
import pytest
import yaml
from support.models import MLP

import pipepart
from pipepart import Pipeline, PipelineStrategy, plan
from pipepart.cli.schema import StrategyConfig, schema_of
from pipepart.cli.train import check_run
from pipepart.errors import ConfigError, PipepartError, PlanError
from pipepart.lightning.strategy_options import StrategyOptions
from pipepart.options import Options
from pipepart.planning import PlanOptions
from pipepart.planning.entry import Target
from pipepart.planning.request import TRAINING_SCHEDULES, ScheduleName

ROOT = Path(pipepart.__file__).parents[1]
NOT_IN_FILES = {"example_batch"}
"""A batch cannot be written in YAML."""
INNER = {"each_replica", "context", "variant"}
"""Fields of `Target` that only our own callers set."""


class Entry(NamedTuple):
    annotation: Any
    default: Any


def declared(options: type, leave_out: set[str] = frozenset()) -> dict[str, Entry]:  # type: ignore[assignment]
    hints = typing.get_type_hints(options)
    fields = [field for field in dataclasses.fields(options) if field.name not in leave_out]
    return {field.name: Entry(hints[field.name], field.default) for field in fields}


def taken(function: Callable[..., Any], others: set[str] = frozenset()) -> dict[str, Entry]:  # type: ignore[assignment]
    """The parameters of a function without `others`, which must be there."""
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    assert others <= set(parameters), f"{function} takes no {sorted(others - set(parameters))}"
    return {name: Entry(hints[name], p.default) for name, p in parameters.items() if name not in others}


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What is missing, what is too many, and what differs."""
    missing = [f"{name} is missing" for name in expected if name not in found]
    unknown = [f"{name} is not an option" for name in found if name not in expected]
    both = [name for name in expected if name in found]
    return [*missing, *unknown, *(f"{n}: {expected[n]} is {found[n]}" for n in both if not same(expected[n], found[n]))]


def same(one: Any, other: Any) -> bool:
    """Equal, and of one type: 0 is not False."""
    if isinstance(one, Entry):
        return one.annotation == other.annotation and same(one.default, other.default)
    return type(one) is type(other) and one == other


# ---- the checker itself


def test_the_checker_finds_what_differs() -> None:
    @dataclasses.dataclass(frozen=True)
    class Few:
        stages: int | Literal["auto"] = "auto"
        verify: bool = False
        timeout: float = 300.0

    def right(stages: int | Literal["auto"] = "auto", verify: bool = False, timeout: float = 300.0) -> None: ...
    def renamed(stage: int | Literal["auto"] = "auto", verify: bool = False, timeout: float = 300.0) -> None: ...
    def fewer(stages: int | Literal["auto"] = "auto", verify: bool = False) -> None: ...
    def other_default(stages: int | Literal["auto"] = "auto", verify: bool = False, timeout: float = 30.0) -> None: ...
    def other_kind(stages: int | Literal["auto"] = "auto", verify: bool = 0, timeout: float = 300.0) -> None: ...  # type: ignore[assignment]
    def other_type(stages: int | str = "auto", verify: bool = False, timeout: float = 300.0) -> None: ...
    def other_word(stages: int | Literal["all"] = "auto", verify: bool = False, timeout: float = 300.0) -> None: ...  # type: ignore[assignment]

    def found(function: Callable[..., Any]) -> list[str]:
        return differences(declared(Few), {k: v for k, v in taken(function).items() if k != "return"})

    assert found(right) == []
    assert found(renamed) == ["stages is missing", "stage is not an option"]
    assert found(fewer) == ["timeout is missing"]
    assert [text.split(":")[0] for text in found(other_default)] == ["timeout"]
    assert [text.split(":")[0] for text in found(other_kind)] == ["verify"]
    assert [text.split(":")[0] for text in found(other_type)] == ["stages"]
    assert [text.split(":")[0] for text in found(other_word)] == ["stages"]


def test_the_checker_finds_a_wrong_row() -> None:
    row = "| option | values | default | meaning |\n|---|---|---|---|\n| loss | `batch`, `microbatch` | `batch` | x |\n"
    hints = {"loss": Entry(Literal["batch", "microbatch"], "batch")}
    assert differences(rows_of(hints), rows_in(row)) == []
    for wrong in (
        row.replace("loss", "losses"),
        row.replace("| `batch` |", "| `op` |"),
        row.replace("`microb", "`nanob"),
    ):
        assert differences(rows_of(hints), rows_in(wrong))
    with pytest.raises(AssertionError, match="no meaning"):
        rows_in(row.replace(" x ", "  "))


# ---- signatures


def test_signature_of_the_strategy() -> None:
    lightnings = set(inspect.signature(lightning.pytorch.strategies.ParallelStrategy.__init__).parameters)
    assert differences(declared(StrategyOptions), taken(PipelineStrategy.__init__, lightnings)) == []


def test_signature_of_the_pipeline() -> None:
    others = {"self", "module_or_step", "example_args", "example_kwargs", "device"}
    assert differences(declared(Options), taken(Pipeline.__init__, others)) == []


def test_signature_of_planning() -> None:
    expected = declared(PlanOptions) | declared(Target, INNER)
    assert differences(expected, taken(plan, {"captured_or_module", "args", "kwargs"})) == []


@pytest.mark.parametrize("function", [PipelineStrategy.__init__, Pipeline.__init__, plan])
def test_options_are_given_by_name(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert all(
        parameters[name].kind == inspect.Parameter.KEYWORD_ONLY
        for name in StrategyOptions.names()
        if name in parameters
    )


def test_names_of_schedules() -> None:
    assert set(typing.get_args(ScheduleName)) == {"auto", *TRAINING_SCHEDULES}


@pytest.mark.parametrize("options", [PlanOptions, Options, StrategyOptions])
def test_every_option_has_a_docstring(options: type) -> None:
    (tree,) = ast.parse(inspect.getsource(options)).body
    assert isinstance(tree, ast.ClassDef)
    for statement, following in zip(tree.body, tree.body[1:]):
        if isinstance(statement, ast.AnnAssign):
            text = following.value if isinstance(following, ast.Expr) else None
            assert isinstance(text, ast.Constant), f"{ast.unparse(statement)} has no docstring"


# ---- configuration


def in_yaml(options: type) -> dict[str, Any]:
    """Names and defaults as a YAML file has them."""
    entries = declared(options, NOT_IN_FILES).items()
    return {name: list(entry.default) if entry.default == () else entry.default for name, entry in entries}


def test_schema_of_the_command_line() -> None:
    def fields(config: type) -> dict[str, Any]:
        return {f.name: Entry(f.type, f.default) for f in dataclasses.fields(config)}

    expected, found = schema_of("Expected", StrategyOptions, NOT_IN_FILES), StrategyConfig
    assert differences(fields(expected), fields(found)) == []
    assert differences(in_yaml(StrategyOptions), vars(found())) == []


def test_default_file_of_the_configuration() -> None:
    written = yaml.safe_load((ROOT / "conf/strategy/auto.yaml").read_text())
    assert differences(in_yaml(StrategyOptions), written) == []


@pytest.mark.parametrize("path", sorted((ROOT / "conf/strategy").glob("*.yaml")), ids=lambda path: path.stem)
def test_other_files_of_the_configuration_have_valid_values(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    assert path.stem == "auto" or written.pop("defaults") == ["auto"]
    assert set(written) <= set(StrategyOptions.names())
    assert StrategyOptions.among(written)


# ---- tables for the reader


def words(annotation: Any) -> set[str]:
    """The values that a type lists by name."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*(words(part) for part in typing.get_args(annotation)))
    if typing.get_origin(annotation) is Literal:
        return {str(word) for word in typing.get_args(annotation)}
    return {bool: {"True", "False"}, type(None): {"None"}}.get(annotation, set())


def rows_of(entries: Mapping[str, Entry]) -> dict[str, tuple[frozenset[str], str]]:
    return {name: (frozenset(words(entry.annotation)), str(entry.default)) for name, entry in entries.items()}


def cells_in(text: str) -> list[list[str]]:
    """The rows of all tables, without their heads."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    rules = [index for index, cells in enumerate(lines) if set(cells[0]) == {"-"}]
    return [cells for index, cells in enumerate(lines) if index not in rules and index + 1 not in rules]


def rows_in(text: str) -> dict[str, tuple[frozenset[str], str]]:
    """Name, listed values and default of each row."""
    found = {}
    for name, values, default, meaning in cells_in(text):
        assert meaning, f"{name} has no meaning"
        assert name not in found, f"{name} is there twice"
        found[name] = (frozenset(re.findall(r"`([^`]+)`", values)), default.strip("`"))
    return found


def test_table_of_the_docs() -> None:
    assert differences(rows_of(declared(StrategyOptions)), rows_in((ROOT / "docs/options.md").read_text())) == []


def test_table_of_the_readme() -> None:
    """A row may have several options; its default begins with the word for it."""
    text = (ROOT / "README.md").read_text().split("## Options of the strategy")[1].split("\n## ")[0]
    found = {
        name: re.match(r"`?(\w+)", default).group(1)  # type: ignore[union-attr]
        for names, default, _ in cells_in(text)
        for name in re.findall(r"`(\w+)`", names)
    }
    said = {None: "none", (): "none", False: "no", 300.0: "300"}
    expected = {
        name: str(entry.default) if type(entry.default) is int else said.get(entry.default, str(entry.default))
        for name, entry in declared(StrategyOptions).items()
    }
    assert differences(expected, found) == []


# ---- values


INVALID = [
    ({"schedule": "1f1"}, r"schedule '1f1' is not known: did you mean '1f1b'\?"),
    ({"microbatches": 0}, "microbatches must be a whole number of at least 1 or 'auto', got 0"),
    ({"stages": "two"}, "stages must be a whole number of at least 1 or 'auto', got 'two'"),
    ({"recompute": "full"}, "recompute must be True, False or 'auto', got 'full'"),
    ({"head": "slices"}, "head must be 'auto', 'whole', 'sliced' or an object with named fields, got 'slices'"),
    ({"head": {"tokens": 8}}, "head.'tokens' is not known"),
    ({"head": {"slice": 0}}, r"head\.slice must be"),
    ({"transport": "sharedmemory"}, r"transport 'sharedmemory' is not known: did you mean 'shared_memory'\?"),
    ({"compile": "yes"}, r"compile='yes' is not known: expected True, False, 'auto', or options"),
    ({"compile": {"dynamic": True}}, "compile: the option 'dynamic' cannot be given: each size"),
    ({"compile": {"mode": "reduce-overhead"}}, "compile: mode is 'reduce-overhead'; expected one of 'default'"),
    ({"compile": {"options": {"triton.cudagraphs": True}}}, "would overwrite the activations"),
    ({"batch_norm": "batches"}, r"batch_norm 'batches' is not known: did you mean 'batch'\?"),
    ({"loss": "microbatches"}, r"loss 'microbatches' is not known: did you mean 'microbatch'\?"),
    ({"randomness": "rank"}, "randomness='rank' is not known: expected 'op'"),
    (
        {"sync": "rings"},
        "sync must be 'mean', 'sharded', 'fsdp', 'master', 'local', 'ring', 'auto' or an object with named fields, got 'rings'",
    ),
    (
        {"sync": {"mode": "shared"}},
        r"sync.mode='shared' is not known: expected 'mean', 'sharded', 'fsdp', 'master', 'local', 'ring', 'auto'",
    ),
    ({"sync": {"mode": "mean", "compres": "bf16"}}, r"sync.'compres' is not known: did you mean 'compress'\?"),
    (
        {"sync": {"compress": "bf16"}},
        "names no mode: expected one of 'mean', 'sharded', 'fsdp', 'master', 'local', 'ring', 'auto' under 'mode'",
    ),
    ({"sync": {"mode": "mean", "inside": 1}}, "sync.inside must be a whole number of at least 2, or None, got 1"),
    ({"sync": {"mode": "master", "inside": 2}}, "sync.inside is a setting of the mode 'mean', got mode='master'"),
    ({"sync": {"inside": "mean", "between": "local"}}, "sync.between needs the replicas of a group in sync.size"),
    ({"sync": {"inside": "mean", "size": 2, "mode": "local"}}, "name the mode between them in sync.between"),
    (
        {"sync": {"mode": "mean", "between": "local", "size": 2}},
        "name the modes of two levels by 'inside' and 'between'",
    ),
    ({"sync": {"inside": 2, "between": "local", "size": 2}}, "sync.inside=2 is not the name of a mode inside a group"),
    ({"sync": {"mode": "mean", "every": 8}}, "sync.every is a setting of the mode 'local', got mode='mean'"),
    (
        {"sync": {"mode": "sharded", "gather": "step"}},
        "sync.gather is a setting of the mode 'fsdp', got mode='sharded'",
    ),
    ({"compile": True, "sync": "fsdp"}, "compile=True is not supported with sync='fsdp'"),
    ({"verify": True, "sync": "fsdp"}, "verify=True is not supported with sync='fsdp'"),
    ({"batch_norm": "batch", "sync": "fsdp"}, "batch_norm='batch' is not supported with sync='fsdp'"),
    ({"sync": {"mode": "ring", "staleness": 0}}, "sync.staleness must be a whole number of at least 1, got 0"),
    ({"sync": {"mode": "local", "every": 0}}, "sync.every must be a whole number of at least 1, got 0"),
    (
        {"sync": {"mode": "local", "compress": "bf16"}},
        "sync.compress is a setting of the modes 'mean', 'sharded', 'fsdp', 'master'",
    ),
    ({"sync": {"mode": "local", "outer_lr": 1.0}}, "outer_momentum need an outer optimizer: set sync.outer='nesterov'"),
    ({"batch_dim": -1}, "batch_dim=-1: expected the dimension of the samples"),
    ({"plan": 3}, "plan must be a Plan or the path of a file with one, got int"),
]


@pytest.mark.parametrize(("values", "text"), INVALID, ids=[next(iter(values)) for values, _ in INVALID])
def test_an_invalid_value_is_refused_by_every_door(values: dict[str, Any], text: str) -> None:
    doors: list[Callable[..., Any]] = [
        Options,
        PipelineStrategy,
        lambda **given: Pipeline(MLP(), MLP.batch(8), **given),
    ]
    if next(iter(values)) in PlanOptions.names():
        doors.append(lambda **given: plan(MLP(), MLP.batch(8), **given))
    if "plan" not in values:  # the schema takes paths only
        doors.append(lambda **given: check_run({"strategy": {**in_yaml(StrategyOptions), **given}, "launcher": {}}))
    for door in doors:
        with pytest.raises(PipepartError, match=text):
            door(**values)


def test_after_is_checked_by_the_strategy_and_the_command_line() -> None:
    for door in (PipelineStrategy, lambda **given: check_run({"strategy": given, "launcher": {}})):
        with pytest.raises(ConfigError, match="after='part' is not known: expected 'whole'"):
            door(after="part")


# ---- a plan is given as it is or by its path


def test_a_plan_by_its_path(tmp_path: Path) -> None:
    model, batch = MLP().double(), MLP.batch(8)
    made = Pipeline(model, batch, microbatches=2).plan
    path = tmp_path / "plan.json"
    made.save(path)
    for given in (made, path, str(path)):
        assert Pipeline(MLP().double(), batch, plan=given).plan.hash == made.hash
        options = PipelineStrategy(plan=given)._options
        assert options.given_plan == made
        assert (options.stages, options.replicas) == (1, 1)


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    files = {
        "text.json": b"{",
        "bytes.json": b"\xff\xfe\x00",
        "list.json": b"[1]",
        "other.json": b'{"version": 99}',
        "fewer.json": b'{"version": 1, "ops": []}',
        "values.json": b'{"version": 1, "tried": [["a", "b"]]}',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.json").mkdir()
    for name in (*files, "folder.json"):
        for door in (PipelineStrategy, lambda **given: Pipeline(MLP(), MLP.batch(8), **given)):
            with pytest.raises(PlanError, match=rf"{name}.*not a plan"):
                door(plan=str(tmp_path / name))
            with pytest.raises(PlanError, match="there is no plan at"):
                door(plan=tmp_path / "none.json")
