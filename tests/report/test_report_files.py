"""Files of a run folder, the trace for Perfetto, the SVG and the terminal."""

from __future__ import annotations

import copy
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from report_samples import costs_of, gpt_graph, jittered, moved, sample_plan
from support.perfetto import check_trace

from pipepart.errors import PlanError
from pipepart.report import (
    GraphView,
    gantt_text,
    load_graph,
    load_timeline,
    plan_text,
    save_graph,
    save_timeline,
    static_svg,
    view,
    write_perfetto,
)
from pipepart.report.timelines import flows, implied_receives

sys.path.insert(0, str(Path(__file__).parents[2]))
from tools import visualize

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_timeline_comes_back_exactly(tmp_path, schedule, chunks):
    timeline = sample_plan(3, chunks, 5, schedule).timeline
    assert load_timeline(save_timeline(tmp_path / "trace.json", timeline)) == timeline


def test_measured_timeline_without_edges_comes_back(tmp_path):
    measured = jittered(sample_plan())
    assert measured.edges is None
    assert load_timeline(save_timeline(tmp_path / "trace.json", measured)) == measured


def test_graph_comes_back_exactly(tmp_path):
    graph = gpt_graph()
    expected = GraphView.of(graph, costs_of(graph))
    assert load_graph(save_graph(tmp_path / "graph.json", graph, costs_of(graph))) == expected


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pipepart": "timeline", "version": 99}', '{"pipepart": "graph"}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    for load in (load_timeline, load_graph, view):
        with pytest.raises(PlanError, match=r"x\.json|plan"):
            load(path)
    with pytest.raises(PlanError, match="nothing at"):
        view(tmp_path / "missing")


def test_view_of_folder_plan_and_trace(tmp_path):
    graph = gpt_graph()
    plan = sample_plan(graph=graph)
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    plan.save(folder / "plan.json")
    alone = view(folder / "plan.json", tmp_path / "alone.html").read_text()
    assert '"known":false' in alone
    assert '"measured":null' in alone
    save_timeline(folder / "trace.json", jittered(plan))
    save_graph(folder / "graph.json", graph)
    assert view(folder) == folder / "report.html"
    for source in (folder, folder / "trace.json", tmp_path / "runs"):
        text = view(source, tmp_path / "page.html").read_text()
        assert '"known":true' in text
        assert '"measured":{' in text
    other = tmp_path / "other.json"
    moved(plan, 2).save(other)
    assert '"same_ops":true' in view(folder, tmp_path / "both.html", compare=other).read_text()


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_perfetto_trace_is_sound(tmp_path, schedule, chunks):
    plan = sample_plan(4, chunks, 6, schedule)
    path = write_perfetto(tmp_path / "trace.json", plan.timeline, measured=jittered(plan))
    document = json.loads(path.read_text())
    check_trace(document)
    events = document["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    received = len(implied_receives(plan.timeline))
    assert len(slices) == len(plan.timeline.events) + received + len(jittered(plan).events)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    starts, ends = ([e for e in events if e["ph"] == phase] for phase in "sf")
    assert {names[e["pid"], e["tid"]].split()[0] for e in starts} == {"send"}
    assert {names[e["pid"], e["tid"]].split()[0] for e in ends if e["pid"] < 4} == {"receive"}
    crossing = [(a, b) for a, b in plan.edges.forward if plan.placement[a] != plan.placement[b]]
    assert len(starts) == len(ends) == 6 * 2 * 2 * len(crossing)
    assert len({e["id"] for e in starts}) == len(starts)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes[0] == "predicted stage 0"
    assert processes[7] == "measured stage 3"


def test_check_trace_finds_faults(tmp_path):
    path = write_perfetto(tmp_path / "trace.json", sample_plan(2, 1, 2).timeline)
    good = json.loads(path.read_text())

    def broken(phase: str, **change: object) -> dict:
        document = copy.deepcopy(good)
        event = next(e for e in document["traceEvents"] if e["ph"] == phase)
        event.update(change)
        return document

    with pytest.raises(ValueError, match="lasts"):
        check_trace(broken("X", dur=-1.0))
    with pytest.raises(ValueError, match="starts at"):
        check_trace(broken("X", ts=-5.0))
    with pytest.raises(ValueError, match="does not"):
        check_trace(broken("s", id=10_000))
    with pytest.raises(ValueError, match="before it begins"):
        check_trace(broken("f", ts=0.0))
    with pytest.raises(ValueError, match="no slice"):
        check_trace(broken("f", pid=99))
    with pytest.raises(ValueError, match="unknown phase"):
        check_trace(broken("X", ph="Q"))
    with pytest.raises(ValueError, match="slices cross"):
        check_trace(broken("X", dur=next(e["dur"] for e in good["traceEvents"] if e["ph"] == "X") * 1.5))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_svg_is_standalone_and_complete(theme):
    plan = sample_plan(4, 1, 8)
    text = static_svg(plan, measured=jittered(plan), theme=theme, title="<GPT> & friends")
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    words = [element.text for element in root.iter(f"{space}text")]
    assert "<GPT> & friends" in words
    assert {f"stage {n}" for n in range(4)} <= set(words)
    assert {"send", "receive"} <= set(words)
    rects = len(list(root.iter(f"{space}rect")))
    received = implied_receives(plan.timeline)
    assert rects > len(plan.timeline.events) + len(received) + len(jittered(plan).events)
    arrows = [path for path in root.iter(f"{space}path") if path.get("opacity")]
    assert len(arrows) == 2 * len(flows(plan.timeline, received))
    width = float(root.get("width"))
    for rect in root.iter(f"{space}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width + 0.1


def test_svg_of_many_chunks_stays_inside():
    root = ET.fromstring(static_svg(sample_plan(8, 2, 8, "interleaved"), width=700))
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= 700.1


def test_terminal_chart():
    plan = sample_plan(4, 1, 8)
    lines = gantt_text(plan.timeline, 100).splitlines()
    assert len(lines) == 6
    assert all(len(line) <= 100 for line in lines[:4])
    assert lines[0].startswith("stage  0  0")
    assert "bubble" in lines[4]
    assert "<" in lines[1]
    assert ">" in lines[1]
    assert "> send, < receive" in lines[5]
    plain = re.sub("\x1b\\[[0-9]+m", "", gantt_text(plan.timeline, 100, color=True))
    assert plain.splitlines() == lines
    text = plan_text(plan, jittered(plan), 90)
    assert "measured (prediction -" in text
    assert text.count("stage  3  ") == 2


def test_command_line_tool(tmp_path, capsys):
    plan = sample_plan(3)
    plan.save(tmp_path / "plan.json")
    save_timeline(tmp_path / "trace.json", jittered(plan))
    wanted = [tmp_path / name for name in ("page.html", "plan.svg", "perfetto.json")]
    command = [str(tmp_path), "-o", str(wanted[0]), "--svg", str(wanted[1]), "--perfetto", str(wanted[2]), "--text"]
    assert visualize.main(command) == 0
    printed = capsys.readouterr().out
    assert all(path.stat().st_size > 1000 and str(path) in printed for path in wanted)
    assert "measured (prediction" in printed
    assert visualize.main([str(tmp_path / "nothing")]) == 1
    assert "there is nothing at" in capsys.readouterr().err
