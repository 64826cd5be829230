"""Files that may hold anything: each reader takes a valid file, or refuses it with one `PipepartError`."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipepart.cost.cluster import load_cluster
from pipepart.cost.given import read_graph
from pipepart.cost.op_costs import OpCosts, read_costs, write_costs
from pipepart.errors import ConfigError, PipepartError, PlanError, ScheduleError
from pipepart.files import keep_json, load_json, load_yaml, may_fail, write_whole
from pipepart.planning import Plan, PlanOptions
from pipepart.report import load_graph, load_timeline, save_graph, save_timeline, view
from pipepart.report.account import MeanStep, account_of, load_account, save_account
from pipepart.report.graph_view import GraphView
from pipepart.schedule import from_csv, read_csv
from pipepart.values import Range

PLAN = Path(__file__).parent / "planning" / "plan_of_version_1.json"
COSTS = OpCosts(("a", "b"), (1.0, 2.0), (0.5, 0.25), (0.0, 1.0), (4, 8), (1, 2), (3, 5), "x", (0.0, 0.1), ((1,), ()))
CLUSTER = {
    "name": "small",
    "devices": {"card": {"flops": {"float32": 1e12}, "memory_bandwidth": 1e11, "memory": 8e9}},
    "links": {"bus": {"bandwidth": 1e10, "latency": 1e-6}},
    "nodes": [{"count": 2, "devices": {"card": 2}, "link": "bus"}],
    "network": "bus",
}
OPERATORS = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {
            "id": n,
            "supportedOnFpga": 1,
            "cpuLatency": 1,
            "fpgaLatency": 1,
            "isBackwardNode": 0,
            "colorClass": n,
            "size": 7,
        }
        for n in range(3)
    ],
    "edges": [{"sourceId": 0, "destId": 1, "cost": 0.5}, {"sourceId": 1, "destId": 2, "cost": 0.25}],
}


def documents(folder: Path) -> dict[str, tuple[Callable[[Path], Any], Any]]:
    """A valid document for each reader."""
    plan = Plan.load(PLAN)
    write_costs(folder / "costs.json", COSTS)
    save_timeline(folder / "trace.json", plan.timeline)
    save_graph(folder / "graph.json", GraphView.from_names(plan.ops), None)
    account = account_of(plan, plan.timeline, MeanStep(9, 0.3, 0.2, 0.05, 0.01))
    assert account is not None
    save_account(folder / "account.json", account)
    return {
        "plan": (Plan.load, json.loads(PLAN.read_text())),
        "trace": (load_timeline, json.loads((folder / "trace.json").read_text())),
        "graph": (load_graph, json.loads((folder / "graph.json").read_text())),
        "account": (load_account, json.loads((folder / "account.json").read_text())),
        "costs": (read_costs, json.loads((folder / "costs.json").read_text())),
        "operators": (read_graph, OPERATORS),
        "cluster": (load_cluster, CLUSTER),
    }


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / (f"{name}.yaml" if name == "cluster" else f"{name}.json")
    path.write_text(text)
    return path


JUNK = [
    None, True, -1, 0, 99, 10**9, 10**30, -0.5, 1e400, math.nan, 1e-320, "", "x", "\x1b[31m", [], [[]], [0], [-1], [99],
    [math.nan], {}, {"a": 1}, [["a", "b"]], [None] * 3, [[0, 1, 2]], "1f1b", "no.csv",
]  # fmt: skip


def mutated(document: Any, draw: random.Random) -> Any:
    """The document with one value replaced, left out or added somewhere."""
    changed = copy.deepcopy(document)
    holder = changed
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return draw.choice(JUNK)
        key = draw.choice(keys)
        inner = holder[key]
        if isinstance(inner, (dict, list)) and inner and draw.random() < 0.7:
            holder = inner
            continue
        how = draw.randrange(4)
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, list):
            holder.append(draw.choice(JUNK))
        else:
            holder[key] = draw.choice(JUNK)
        return changed


@pytest.mark.parametrize("name", ["plan", "trace", "graph", "costs", "operators", "cluster"])
def test_readers_take_valid_files_and_refuse_all_others(name: str, tmp_path: Path) -> None:
    reader, document = documents(tmp_path)[name]
    reader(written(tmp_path, name, json.dumps(document)))
    draw = random.Random(name)
    for _ in range(150):
        path = written(tmp_path, name, json.dumps(mutated(document, draw)))
        with suppress(PipepartError):  # no other error comes out
            reader(path)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    content=st.binary(max_size=60), name=st.sampled_from(["plan", "trace", "graph", "costs", "operators", "cluster"])
)
def test_any_bytes_are_refused(content: bytes, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    readers = {"plan": Plan.load, "trace": load_timeline, "graph": load_graph, "costs": read_costs}
    reader = readers.get(name, read_graph if name == "operators" else load_cluster)
    path = folder / ("any.yaml" if name == "cluster" else "any.json")
    path.write_bytes(content)
    with pytest.raises(PipepartError):
        reader(path)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_a_plan_that_is_read_can_be_simulated_and_shown(seed: int) -> None:
    document = mutated(json.loads(PLAN.read_text()), random.Random(seed))
    try:
        plan = Plan.from_json(json.dumps(document))
    except PlanError:
        return
    assert plan.describe()
    assert plan.step_time >= 0


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("chunk_of", [99] * 14, "chunk_of"),
        ("chunk_of", [0], "chunk_of has 1 entries"),
        ("placement", [], r"placement is \[\]"),
        ("placement", [0, 5], "placement"),
        ("placement", [1, 0], "stage of a chunk"),
        ("microbatches", 10**9, "micro-batches x chunks"),
        ("microbatches", 0, "at least 1"),
        ("microbatch_size", 0, "at least 1"),
        ("replicas", 10**12, "replicas x chunks"),
        ("replicas", -1, "replicas is -1"),
        ("slack", 0.5, "slack is 0.5"),
        ("lower_bound", math.nan, "lower_bound is nan"),
        ("lower_bound", math.inf, "lower_bound is inf"),
        ("schedule", "fast", "schedule 'fast' is not known"),
        ("schedule", "zb_v", "takes chunks=2 per stage"),
        ("ops", "abc", "ops is 'abc'"),
        ("tried", [["a", "b"]], r"tried\[0\]\[1\] is 'b'"),
        ("colour", "red", "unknown field 'colour'"),
        ("traffic", [{"source": 0}], r"no field 'traffic\[0\].target'"),
        ("recompute", [True], "recompute has 1 entries"),
        ("actions", "0F0,0X0\n", "is not an action"),
    ],
)
def test_plans_that_cannot_be_run_are_refused_with_the_field(field: str, value: Any, part: str, tmp_path: Path) -> None:
    document = json.loads(PLAN.read_text())
    document[field] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=f"plan.json.*{part}"):
        Plan.load(path)


def test_traffic_between_chunks_that_are_not_there() -> None:
    document = json.loads(PLAN.read_text())
    document["traffic"][0]["target"] = 7
    with pytest.raises(PlanError, match="edge 0>7"):
        Plan.from_json(json.dumps(document))
    document = json.loads(PLAN.read_text())
    document["chunks"][1]["forward"] = -1.0
    with pytest.raises(PlanError, match=r"chunks\[1\].forward is -1.0"):
        Plan.from_json(json.dumps(document))


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused(opening: str, closing: str, tmp_path: Path) -> None:
    for depth in (100, 200_000):
        text = opening * depth + "1" + closing * depth
        for name, reader in {"x.json": Plan.load, "y.json": load_timeline, "z.yaml": load_cluster}.items():
            (tmp_path / name).write_text(text)
            with pytest.raises(PipepartError, match=name):
                reader(tmp_path / name)
    with pytest.raises(PlanError):
        view(tmp_path / "x.json")


def test_yaml_aliases_and_large_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n")
    with pytest.raises(ConfigError, match="alias"):
        load_yaml(path, ConfigError)
    path.write_text("a: " + "x" * 300_000)
    with pytest.raises(ConfigError, match="more than 262144 bytes"):
        load_yaml(path, ConfigError)
    with pytest.raises(PlanError, match="regular file"):
        load_json("/dev/zero")


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_json(tmp_path / "file" / "below.json", {"a": 1})
    (tmp_path / "taken.json").mkdir()
    keep_json(tmp_path / "taken.json", {"a": 1})
    keep_json(tmp_path / "fine.json", {"a": 1})
    assert load_json(tmp_path / "fine.json").value == {"a": 1}
    assert not list(tmp_path.glob("*.tmp"))


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "a.json", tmp_path / "link"
    write_whole(path, "one", sync=True)
    link.symlink_to(path)
    write_whole(link, "two")
    assert link.is_symlink()
    assert path.read_text() == "two"
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "three \ud800")
    assert path.read_text() == "two"
    with pytest.raises(OSError, match="No space left"):
        write_whole("/dev/full", "text")
    write_whole("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "link"]


def test_a_write_that_may_fail_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("pipepart").addHandler(caplog.handler)
    try:
        with may_fail("report.html"):
            write_whole("/dev/full", "text")
        with may_fail("plan.json"):
            raise ValueError("no plan")
    finally:
        logging.getLogger("pipepart").removeHandler(caplog.handler)
    said = list(dict.fromkeys(record.getMessage() for record in caplog.records))
    assert said[0].startswith("pipepart: report.html could not be written: No space left on device. ")
    assert said[1].startswith("pipepart: plan.json could not be written: ValueError: no plan. ")


def test_files_that_are_no_texts_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with open(tmp_path / "huge.csv", "wb") as file:
        file.truncate(10 * 2**30)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "device.csv").symlink_to("/dev/zero")
    for name, reason in {
        "pipe": "regular file",
        "folder": "regular file",
        "device": "regular file",
        "huge": "more than 268435456 bytes",
    }.items():
        for reader, error in ((load_json, PlanError), (read_csv, ScheduleError), (Plan.load, PlanError)):
            with pytest.raises(error, match=f"{name}.csv.*{reason}"):
                reader(tmp_path / f"{name}.csv")


def test_a_field_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"version": 1, "names": [], "names": ["a"]}')
    with pytest.raises(PlanError, match=r"costs.json is not JSON: the field 'names' occurs twice"):
        read_costs(path)


@dataclass(frozen=True)
class Inner:
    """An object inside of another one."""

    counts: tuple[Annotated[int, Range(-1, 5)], ...] = ()
    word: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    """The fields of a file."""

    inner: dict[str, Inner]
    maybe: Inner | None = None


def test_ranges_of_files_are_declared_by_annotations(tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    for text, part in {
        '{"inner": {"x": {"counts": [0, 9]}}}': r"inner.x.counts\[1\] is 9; expected a whole number of at most 5",
        '{"inner": {"x": {"counts": [-2]}}}': r"inner.x.counts\[0\] is -2; expected a whole number of at least -1",
        '{"inner": {"x": {"word": "c"}}}': "inner.x.word is 'c'; expected 'a' or 'b'",
        '{"inner": {}, "maybe": {"counts": 1}}': "maybe.counts is 1; expected a list",
        '{"inner": {}, "maybe": {"size": 1}}': "unknown field 'maybe.size'",
        '{"inner": {}, "maybe": 3}': "maybe is 3; expected an object with named fields or None",
        "{}": "there is no field 'inner'",
    }.items():
        path.write_text(text)
        with pytest.raises(PlanError, match=f"any.json: {part}"):
            load_json(path).read(Outer)
    path.write_text('{"inner": {"x": {"counts": [-1, 5]}}}')
    assert load_json(path).read(Outer) == Outer({"x": Inner((-1, 5))})


def test_options_name_the_part_that_does_not_fit() -> None:
    with pytest.raises(PlanError, match=r"keep_together\[0\]\[1\] must be a string, got 3"):
        PlanOptions(keep_together=[["a", 3]])  # type: ignore[list-item]
    with pytest.raises(PlanError, match="split_at must be a list of strings or None, got 'abc'"):
        PlanOptions(split_at="abc")


def test_nested_overlaps_of_a_schedule_are_refused() -> None:
    for depth in (2, 5000):
        with pytest.raises(ScheduleError, match="is not an action"):
            from_csv("(" * depth + "0F0;0B0" + ")OVERLAP_F_B" * depth)
