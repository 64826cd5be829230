"""The page in a real browser: it loads without complaint, shows every stage and action, and its controls work."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_samples import costs_of, gpt_graph, jittered, moved, sample_plan

from pipepart.report import write_report
from pipepart.report.account import MEANINGS, MeanStep, account_of
from pipepart.report.timelines import flows, implied_receives
from pipepart.schedule import Timeline, make_schedule, simulate

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no chromium is installed (apt-get install chromium)", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

NASTY = "</script><img src=x onerror=alert(1)>\"'&é漢字"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """One file for each kind of page."""
    folder = tmp_path_factory.mktemp("pages")
    graph = gpt_graph(6)
    costs = costs_of(graph)
    plan = dataclasses.replace(
        sample_plan(4, graph=graph), tried=(("gpipe, 4 stages", 0.2), ("2 x 2 devices", 0.3)), cluster="two hosts"
    )
    measured = jittered(plan)
    other = moved(sample_plan(4, 1, 8, "zb_h1", graph=graph, seed=3), 5)
    odd = gpt_graph(4, NASTY)
    split = sample_plan(3, 2, 7, "zb_v", graph=gpt_graph(5))
    account = account_of(plan, measured, MeanStep(20, measured.step_time + 0.02, measured.step_time, 0.01, 0.004))
    return {
        "full": write_report(
            folder / "full.html",
            plan,
            graph=graph,
            costs=costs,
            measured=measured,
            title="GPT",
            memory_limit=3e7,
            account=account,
        ),
        "both": write_report(folder / "both.html", plan, graph=graph, costs=costs, measured=measured, compare=other),
        "alone": write_report(folder / "alone.html", sample_plan(5, 2, 8, "interleaved")),
        "split": write_report(folder / "split.html", split, graph=gpt_graph(5)),
        "nasty": write_report(
            folder / "nasty.html", sample_plan(2, graph=odd), graph=odd, costs=costs_of(odd), title=NASTY
        ),
        "one": write_report(folder / "one.html", dataclasses.replace(sample_plan(1, 1, 1, "gpipe"), traffic=())),
    }


class Opened:
    """A page with all it had to complain about."""

    def __init__(self, browser: Any, path: Path, width: int = 1400, theme: str = "light", touch: bool = False) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, has_touch=touch
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on(
            "request", lambda r: self.complaints.append(f"request: {r.url}") if not r.url.startswith("file:") else None
        )
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=120_000)
        self.page.evaluate("pipepart.openWhatIf()")
        self.page.wait_for_selector("#whatif-table")

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, kind: object, *rest: object) -> None:
        self.context.close()
        if kind is None:
            assert self.complaints == []


def full(measured: Timeline, plan: Any) -> Timeline:
    """A measured timeline with what the page knows about it from the plan."""
    return dataclasses.replace(measured, edges=plan.edges)


def labels_that_collide(page: Any) -> list[str]:
    """Texts of the charts that touch each other or leave the picture, and boxes of the graph that overlap."""
    return page.evaluate((Path(__file__).parent / "collisions.js").read_text())


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize(
    ("kind", "theme"),
    [
        ("full", "light"),
        pytest.param("full", "dark", marks=pytest.mark.slow),  # themes differ in colours only
        *(pytest.param(kind, "light", marks=pytest.mark.slow) for kind in ("both", "alone", "split", "nasty", "one")),
    ],
)
def test_loads_in_both_themes_and_sizes_with_no_label_hidden(browser, pages, kind, width, theme):
    with Opened(browser, pages[kind], width, theme, touch=width < 500) as page:
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        assert labels_that_collide(page) == []
        if kind == "both":  # the comparison is seen whole, without scrolling
            table = page.locator("#compare table")
            assert table.evaluate("(t) => t.offsetWidth <= t.parentElement.clientWidth")
        if kind != "one" and theme == "light":
            page.click("#graph-more")
            assert labels_that_collide(page) == []


@pytest.mark.slow
def test_the_check_for_collisions_finds_one(browser, pages):
    with Opened(browser, pages["full"]) as page:
        page.evaluate(
            """() => {
              const copy = (all, name) => all[2].setAttribute(name, all[3].getAttribute(name));
              copy(document.querySelectorAll("#graph .node"), "transform");
              copy(document.querySelectorAll("#schedule svg text"), "x");
            }"""
        )
        found = labels_that_collide(page)
        assert any(item.startswith("graph:") for item in found)
        assert any(item.startswith("gantt:") for item in found)


def test_every_stage_and_every_action_is_there(browser, pages):
    plan = sample_plan(4, graph=gpt_graph(6))
    measured = jittered(plan)
    with Opened(browser, pages["full"]) as page:
        for label, timeline in (("predicted", plan.timeline), ("measured", measured)):
            expected = [*timeline.events, *implied_receives(timeline)]
            found = page.eval_on_selector_all(
                f'#schedule [data-timeline="{label}"] .ev',
                "all => all.map((e) => [Number(e.dataset.stage), e.dataset.action])",
            )
            assert sorted(map(tuple, found)) == sorted((e.stage, str(e.action)) for e in expected)
        for stage in range(4):
            assert page.locator(f'#stages [data-stage="{stage}"]').count() == 2
            assert page.locator(f'#stages [data-memory="{stage}"] i').count() == 5
            assert page.locator(f'#overview .chunk[data-stage="{stage}"]').count() == 1
            assert page.locator(f'#schedule path[data-memory="{stage}"]').count() == 2
        assert page.locator("#schedule .ev.critical").count() > 8
        messages = [
            len(flows(timeline, implied_receives(timeline))) for timeline in (plan.timeline, full(measured, plan))
        ]
        assert page.locator("#schedule .flow").count() == sum(messages)
        for name in ("send (below)", "receive (above)", "idle", "critical path"):
            assert name in page.inner_text("#schedule .legend")
        assert page.locator("[data-skip='0-2']").count() == 1
        page.click("#tried summary")
        assert page.locator("#tried tbody tr").count() == 2
        assert "167" in page.inner_text("#kpi-step") or "ms" in page.inner_text("#kpi-step")


def test_the_account_of_a_step_adds_up(browser, pages):
    with Opened(browser, pages["full"]) as page:
        names = page.locator("#account .bars .label").all_inner_texts()
        shares = page.locator("#account .bars .figure").all_inner_texts()
        assert names == list(MEANINGS)
        assert sum(float(text.split("·")[1].removesuffix(" %")) for text in shares) == pytest.approx(100, abs=0.5)
        assert "pipeline" in page.locator("#advice").inner_text()
        assert page.locator("#account li").count() == 2


def test_a_step_faster_than_the_bound_says_why(browser, tmp_path):
    """The bound is as good as the costs: those of a busy machine make a bound that a later run beats."""
    plan = sample_plan(2)
    for share, text in ((0.5, "costs of the ops are too high"), (2.0, "no split, no schedule is faster")):
        path = write_report(tmp_path / "page.html", plan, measured_step=plan.lower_bound * share)
        with Opened(browser, path) as page:
            assert text in page.inner_text("#kpi-bound")


def test_graph_opens_closes_and_shows_cuts(browser, pages):
    with Opened(browser, pages["full"]) as page:
        seen = lambda: int(page.get_attribute("#graph svg.canvas", "data-nodes"))  # noqa: E731
        first = seen()
        assert page.locator("#graph .edge.cut").count() > 0
        assert page.locator("#graph .edge.skip").count() > 0
        assert page.locator("#graph [data-tied='transformer.wte.weight']").count() == 1
        assert page.locator("#graph .bytes").count() > 0
        page.click('#graph [data-zoom="fit"]')
        page.click('#graph .node[data-label="3"] .opener')
        assert seen() > first
        assert page.locator('#graph .node[data-path="transformer.h.3.attn"]').count() == 1
        page.click('#graph .node.open[data-label="3"] .opener')
        assert seen() == first
        page.click("#graph-close")
        assert seen() < first
        page.click('#graph [data-mode="stage"]')
        assert page.locator('#graph .node[data-label="stage 2"]').count() == 1
        page.click("#graph-close")
        assert seen() == 4
        assert page.locator("#graph .bytes").count() >= 3


def test_search_click_and_details(browser, pages):
    with Opened(browser, pages["full"]) as page:
        page.fill("#graph-search", "h.4.mlp.fc")
        assert page.locator("#graph .node.hit").count() == 1
        page.press("#graph-search", "Enter")
        shown = page.locator('#graph .node.selected[data-path="transformer.h.4.mlp.fc"]')
        assert shown.count() == 1
        frame, box = page.locator("#graph .frame").bounding_box(), shown.bounding_box()
        assert frame["x"] <= box["x"] < frame["x"] + frame["width"]
        assert frame["y"] <= box["y"] < frame["y"] + frame["height"]
        text = page.inner_text("#graph .details")
        for word in (
            "transformer.h.4.mlp.fc",
            "Linear",
            "4 x 128 x 256",
            "float32",
            "524 KB",
            "1.05 MB",
            "forward",
            "model.py:",
        ):
            assert word in text
        page.click("#graph .details .link >> nth=0")
        assert page.get_attribute("#graph .details", "data-shown") == "ln_2"
        page.fill("#graph-search", "no such thing")
        assert "0 ops found" in page.inner_text("#graph-found")
        page.locator("#graph .bytes").first.dispatch_event("click")
        assert "over the cut" in page.inner_text("#graph .details")


def test_zoom_of_chart_and_graph(browser, pages):
    with Opened(browser, pages["full"]) as page:
        count = lambda: page.locator('#schedule [data-timeline="predicted"] .ev').count()  # noqa: E731
        whole = count()
        for _ in range(4):
            page.click('#schedule [data-zoom="in"]')
        assert 0 < count() < whole
        assert "visible" in page.inner_text("#schedule .tools")
        page.click('#schedule [data-zoom="fit"]')
        assert count() == whole
        chart = page.locator("#schedule svg.gantt").bounding_box()
        page.mouse.move(chart["x"] + 400, chart["y"] + 60)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -600)
        page.keyboard.up("Control")
        assert count() < whole
        page.locator('#schedule .ev[data-stage="1"]').first.hover(force=True)
        assert page.locator("#tip").is_visible()
        zoom = lambda: float(page.get_attribute("#graph svg.canvas", "data-zoom"))  # noqa: E731
        before = zoom()
        page.click('#graph [data-zoom="in"]')
        assert zoom() > before
        page.click('#graph [data-zoom="fit"]')
        assert zoom() < before
        page.uncheck("#gantt-critical")
        assert page.locator("#schedule .ev.critical").count() == 0
        page.uncheck("#gantt-memory")
        assert page.locator("#schedule path[data-memory]").count() == 0


def pinch(page: Any, selector: str, apart: tuple[float, float]) -> None:
    """Two fingers on an element, from one distance to another, as the browser gets them from a touch screen."""
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + min(box["height"] / 2, 60)
    touch = page.context.new_cdp_session(page)

    def fingers(kind: str, distance: float | None) -> None:
        points = (
            [] if distance is None else [{"x": x + side * distance / 2, "y": y, "id": side + 1} for side in (-1, 1)]
        )
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", apart[0])
    for part in range(1, 6):
        fingers("touchMove", apart[0] + (apart[1] - apart[0]) * part / 5)
    fingers("touchEnd", None)


@pytest.mark.slow
def test_pinch_zooms_chart_and_graph(browser, pages):
    with Opened(browser, pages["full"], 400, touch=True) as page:
        seen = lambda: page.evaluate("pipepart.mainGantt.to - pipepart.mainGantt.from")  # noqa: E731
        middle = lambda: page.evaluate("(pipepart.mainGantt.to + pipepart.mainGantt.from) / 2")  # noqa: E731
        whole, center = seen(), middle()
        pinch(page, "#schedule svg.gantt", (60, 180))
        assert seen() == pytest.approx(whole / 3, rel=0.1)
        assert abs(middle() - center) < whole / 4  # what was between the fingers stays there
        assert page.evaluate("visualViewport.scale") == 1  # the chart, not the page
        pinch(page, "#schedule svg.gantt", (180, 60))
        assert seen() == pytest.approx(whole, rel=0.1)
        zoom = lambda: float(page.get_attribute("#graph svg.canvas", "data-zoom"))  # noqa: E731
        before = zoom()
        pinch(page, "#graph svg.canvas", (60, 120))
        assert zoom() == pytest.approx(2 * before, rel=0.1)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "slack"),
    [
        ("1f1b", 12, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpipe", 8, 0), ("zb_h1", 16, 0), ("zb_h2", 5, 0))),
    ],
)
def test_what_if_says_what_python_says(browser, pages, schedule, microbatches, slack):
    plan = sample_plan(4, graph=gpt_graph(6))
    with Opened(browser, pages["full"]) as page:
        page.select_option("#whatif-schedule", schedule)
        page.fill("#whatif-microbatches", str(microbatches))
        page.fill("#whatif-slack", str(slack))
        expected = simulate(
            make_schedule(schedule, stages=4, microbatches=microbatches, slack=slack), plan.costs, plan.edges
        ).step_time
        assert float(page.get_attribute("#whatif", "data-step")) == pytest.approx(expected, abs=1e-9)


def test_what_if_controls(browser, pages):
    with Opened(browser, pages["full"]) as page:
        step = lambda: float(page.get_attribute("#whatif", "data-step"))  # noqa: E731
        assert step() == pytest.approx(sample_plan(4, graph=gpt_graph(6)).step_time, abs=1e-9)
        before = step()
        page.select_option("#whatif-link", "10")
        assert step() > before
        page.select_option("#whatif-link", "1")
        page.select_option("#whatif-schedule", "zb_v")
        assert "needs 2 chunks per stage" in page.inner_text("#whatif-error")
        page.select_option("#whatif-stages", "2")
        assert "takes no slack" in page.inner_text("#whatif-error")
        page.fill("#whatif-slack", "0")
        assert page.inner_text("#whatif-error") == ""
        assert page.locator('#whatif .ev[data-stage="1"]').count() > 0
        page.select_option("#whatif-stages", "4")
        page.select_option("#whatif-schedule", "1f1b")
        page.wait_for_selector('#whatif-table [data-schedule="zb_h1"][data-microbatches="16"]')
        page.click('#whatif-table [data-schedule="zb_h1"][data-microbatches="16"]')
        assert page.input_value("#whatif-microbatches") == "16"
        assert page.input_value("#whatif-schedule") == "zb_h1"


@pytest.mark.slow
def test_two_plans_side_by_side(browser, pages):
    with Opened(browser, pages["both"]) as page:
        assert page.locator("#compare").is_visible()
        assert "zb_h1" in page.inner_text("#compare table")
        assert "on another stage" in page.inner_text("#moved")
        assert page.locator('#schedule [data-timeline="B predicted"] .ev.W').count() == 32
        before = page.get_attribute('#graph .node[data-label="1"]', "data-stages")
        page.click('#graph [data-plan="B"]')
        page.click('#graph [data-mode="module"]')
        assert page.get_attribute('#graph .node[data-label="1"]', "data-stages") != before


def test_names_are_shown_as_text(browser, pages):
    with Opened(browser, pages["nasty"]) as page:
        assert page.inner_text("#title") == NASTY
        assert page.title() == NASTY
        assert page.locator("img").count() == 0
        page.fill("#graph-search", "onerror")
        page.press("#graph-search", "Enter")
        assert NASTY in page.inner_text("#graph .details")


@pytest.mark.slow
def test_theme_switch_changes_colours(browser, pages):
    with Opened(browser, pages["full"]) as page:
        colour = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
        light = colour()
        page.click("#theme")
        assert colour() != light
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.slow
def test_chunk_in_overview_leads_to_the_graph(browser, pages):
    with Opened(browser, pages["full"]) as page:
        page.click('#overview .chunk[data-chunk="2"]')
        assert page.get_attribute("#graph .details", "data-shown") == "stage 2"
        assert page.get_attribute('#graph [data-mode="stage"]', "aria-pressed") == "true"


@pytest.mark.slow
def test_large_graph_keeps_the_page_small(browser, tmp_path):
    """10,000 ops, 16 stages, 64 micro-batches: only what is in sight becomes elements, also after opening and searching."""
    graph = gpt_graph(770)
    plan = sample_plan(16, 1, 64, graph=graph)
    path = write_report(tmp_path / "big.html", plan, graph=graph, costs=costs_of(graph), measured=jittered(plan))
    with Opened(browser, path) as page:
        assert page.evaluate("document.querySelectorAll('*').length") < 25_000
        assert int(page.get_attribute("#graph svg.canvas", "data-nodes")) < 200
        page.fill("#graph-search", "h.500.mlp.fc")
        page.press("#graph-search", "Enter")
        assert page.locator('#graph .node.selected[data-path="transformer.h.500.mlp.fc"]').count() == 1
        for _ in range(6):
            page.click("#graph-more")
        assert int(page.get_attribute("#graph svg.canvas", "data-nodes")) <= 1500
        actions = page.locator('#schedule [data-timeline="predicted"] .ev:not(.SEND):not(.RECV)').count()
        assert actions == 2 * 16 * 64


@pytest.mark.slow
def test_flat_graph_is_bundled(browser, tmp_path):
    """A graph without modules: neighbours become bundles, so that no picture has thousands of boxes."""
    graph = gpt_graph(100)
    for op in graph.ops:
        op.module = ""
    plan = sample_plan(4, graph=graph)
    path = write_report(tmp_path / "flat.html", plan, graph=graph, costs=costs_of(graph))
    with Opened(browser, path) as page:
        assert int(page.get_attribute("#graph svg.canvas", "data-nodes")) <= 120
        assert labels_that_collide(page) == []
        data = json.loads(page.inner_text("#data") or page.evaluate("document.getElementById('data').textContent"))
        assert len(data["graph"]["columns"]["name"]) == len(graph.ops)
