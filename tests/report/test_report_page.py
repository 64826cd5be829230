"""The page as text: what is in it, that nothing in a name can get out of it, and what it refuses."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re

import pytest
from report_samples import costs_of, gpt_graph, jittered, moved, sample_plan

from pipepart.errors import PlanError
from pipepart.planning import StageMemory
from pipepart.report import GraphView, write_report
from pipepart.report.page import MemoryModel, embed_json, make_payload, render_page, stage_memory

NASTY = "</script><script>alert(1)</script><!-- \"quotes' & \u2028 é 漢字 \U0001f600"


def data_of(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_names_stay_inside_the_data():
    graph = gpt_graph(3, NASTY)
    text = render_page(make_payload(sample_plan(3, graph=graph), title=NASTY, graph=GraphView.of(graph)))
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    data = data_of(text)
    assert data["title"] == NASTY
    assert any(NASTY in word for word in data["graph"]["words"])


def test_embedded_json_survives_everything():
    for value in (NASTY, "]]>", "<!--", "&amp;", "\x00", "\\u003c"):
        text = embed_json({value: value})
        assert not set(text) & set("<>&\u2028\u2029")
        assert json.loads(text) == {value: value}


def test_a_rehearsal_is_what_the_page_predicts():
    plan = sample_plan(3)
    data = make_payload(dataclasses.replace(plan, rehearsed=2 * plan.step_time), title="x")["plan"]
    assert (data["predicted"], data["step_time"]) == (2 * plan.step_time, plan.step_time)
    assert data["throughput"] == pytest.approx(plan.batch_size * plan.replicas / data["predicted"])
    assert make_payload(plan, title="x")["plan"]["predicted"] == plan.step_time


def test_policy_allows_only_the_page_itself():
    text = render_page(make_payload(sample_plan(), title="x"))
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert found
    policy = html.unescape(found.group(1))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        inner = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(inner) == 1
        digest = base64.b64encode(hashlib.sha256(inner[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"(src|href)=.?(https?:)?//", text)


def test_page_holds_plan_graph_and_measurement(tmp_path):
    graph = gpt_graph()
    plan = sample_plan(graph=graph)
    measured = jittered(plan)
    path = write_report(
        tmp_path / "deep" / "report.html",
        plan,
        graph=graph,
        costs=costs_of(graph),
        measured=measured,
        compare=moved(plan, 3),
    )
    data = data_of(path.read_text())
    assert data["plan"]["step_time"] == plan.step_time
    assert data["measured_step"] == measured.step_time
    assert data["same_ops"] is True
    assert len(data["plan"]["timeline"]["columns"]["start"]) == len(plan.timeline.events)
    assert [tuple(edge) for edge in data["measured"]["edges"]["forward"]] == sorted(plan.edges.forward)
    assert data["graph"]["tied"] == [["transformer.wte.weight", [1, len(graph.ops) - 2]]]
    assert len(data["graph"]["edges"]) == 2 * len(graph.edges)


def test_memory_by_kind():
    plan = sample_plan(4)
    rows = stage_memory(plan, MemoryModel(optimizer_states=1.0, limit=[1e6, 2e6, 3e6, 4e6]))
    for stage, row in enumerate(rows):
        weights = sum(chunk.parameter_bytes for chunk in plan.chunks if chunk.stage == stage)
        assert row["weights"] == row["gradients"] == row["optimizer"] == weights
        assert row["activations"] == plan.timeline.peak_activations[stage]
        assert row["limit"] == (stage + 1) * 1e6
    with pytest.raises(PlanError, match="one for each stage"):
        stage_memory(plan, MemoryModel(limit=[1.0]))


def test_memory_that_the_plan_knows_is_shown_as_it_is():
    held = tuple(StageMemory(100 + n, 200, 300, 400) for n in range(4))
    plan = dataclasses.replace(sample_plan(4), memory=held, memory_limit=5e3)
    rows = stage_memory(plan)
    assert [row["weights"] for row in rows] == [100, 101, 102, 103]
    assert {(row["optimizer"], row["activations"], row["limit"]) for row in rows} == {(300, 400, 5e3)}
    assert make_payload(plan, title="x")["optimizer_states"] is None
    assert make_payload(sample_plan(4), title="x")["optimizer_states"] == 2.0
    assert stage_memory(plan, MemoryModel(0.0, 1.0))[1] == {
        **dataclasses.asdict(held[1]),
        "optimizer": 0.0,
        "limit": 1.0,
    }


def test_refuses_what_does_not_belong_to_the_plan():
    graph = gpt_graph()
    plan = sample_plan(graph=graph)
    with pytest.raises(PlanError, match="belongs to another plan"):
        make_payload(plan, title="x", graph=GraphView.of(gpt_graph(2)))
    with pytest.raises(PlanError, match="3 stages; expected 4, as the plan"):
        make_payload(plan, title="x", measured=jittered(sample_plan(3)))
    with pytest.raises(PlanError, match="another graph"):
        GraphView.of(graph, costs_of(gpt_graph(2)))


def test_size_of_a_large_page(tmp_path):
    """10,000 ops on 16 stages with 64 micro-batches, predicted and measured: below 10 MB."""
    graph = gpt_graph(770)
    assert len(graph.ops) > 10_000
    plan = sample_plan(16, 1, 64, graph=graph)
    path = write_report(tmp_path / "big.html", plan, graph=graph, costs=costs_of(graph), measured=jittered(plan))
    assert path.stat().st_size < 10_000_000


def test_one_stage_and_plan_alone(tmp_path):
    plan = sample_plan(1, 1, 1, "gpipe")
    assert write_report(tmp_path / "one.html", dataclasses.replace(plan, traffic=())).exists()
