"""The page of a running job: what its server answers, to whom, and that it ends with the job."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
from report_samples import jittered, sample_plan
from support.lightning_modules import Module, loader

from pipepart import PipelineMonitor, PipelineStrategy
from pipepart.cli.live_server import LiveServer, still_runs
from pipepart.cli.main import main
from pipepart.errors import PlanError
from pipepart.report import save_timeline
from pipepart.report.live_state import LIVE, LiveState, load_live, save_live


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plan = sample_plan(3)
    plan.save(tmp_path / "plan.json")
    save_timeline(tmp_path / "trace.json", jittered(plan))
    begun = LiveState("<b>my run</b>", os.getpid(), os.uname().nodename, time.time(), time.time(), of=30)
    save_live(tmp_path, begun.at(10, {"loss": -2.5, "gone": float("nan")}, [1e6, 2e6, 3e6], {"bubble": 0.25}))
    (tmp_path / "config.yaml").write_text("secret: yes")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(folder) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(
    server: LiveServer, name: str, method: str = "GET", host: str | None = None, key: str | None = None
) -> tuple[int, dict[str, str], str]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Host": host or f"127.0.0.1:{port}"}
    connection.request(method, f"/{server.key if key is None else key}/{name}", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def test_the_page_the_state_and_the_report(server: LiveServer, folder: Path) -> None:
    status, headers, text = ask(server, "")
    assert status == 200
    assert "<title>&lt;b&gt;my run&lt;/b&gt;</title>" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    state = json.loads(ask(server, "state.json")[2])
    assert (state["step"], state["of"], state["runs"]) == (10, 30, True)
    assert state["values"] == {"loss": [-2.5], "gone": [None]}
    assert state["memory"] == [1e6, 2e6, 3e6]
    report = ask(server, "report.html")[2]
    assert '"measured":{' in report

    save_live(folder, load_live(folder).at(20, {"loss": 1.0}, [1e6] * 3, {}))
    (folder / "trace.json").unlink()
    renewed = json.loads(ask(server, "state.json")[2])
    assert (renewed["step"], renewed["values"]["loss"]) == (20, [-2.5, 1.0])
    assert renewed["report"] != state["report"]
    assert '"measured":null' in ask(server, "report.html")[2]


def test_nothing_else_is_served_and_nothing_is_changed(server: LiveServer, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert server.server_address[0] == "127.0.0.1"
    for name in ("config.yaml", "plan.json", LIVE, "../config.yaml", "%2e%2e/config.yaml", "state.json/", "x"):
        assert ask(server, name)[0] == 404
    for key in ("", "x", server.key[:-1], f"{server.key}x"):
        assert ask(server, "state.json", key=key)[0] == 404
    port = server.server_address[1]
    for host in ("example.org", f"example.org:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
        assert ask(server, "state.json", host=host)[0] == 403
    assert ask(server, "state.json", host=f"localhost:{port}")[0] == 200
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(server, "state.json", method)[0] == 501
    status, headers, text = ask(server, "state.json", "HEAD")
    assert (status, text) == (200, "") and int(headers["Content-Length"]) > 100
    (folder / LIVE).write_text("{")
    assert ask(server, "state.json")[0] == 503
    (folder / LIVE).write_bytes(before[LIVE])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_it_ends_with_the_job(folder: Path, capsys) -> None:
    def end() -> None:
        time.sleep(1)
        save_live(folder, load_live(folder).end("the job has failed with ValueError"))

    thread = threading.Thread(target=end)
    thread.start()
    assert main(["view", "--live", str(folder)]) == 0
    thread.join()
    shown = capsys.readouterr().out
    assert "http://127.0.0.1:" in shown and "the job has failed with ValueError" in shown
    assert main(["view", "--live", str(folder)]) == 2
    assert "has ended" in capsys.readouterr().err
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    alive = replace(load_live(folder), ended=None)
    assert still_runs(alive) and not still_runs(replace(alive, process=gone.pid))
    assert still_runs(replace(alive, process=gone.pid, host="elsewhere"))


def test_wrong_folders_and_files_are_refused(folder: Path, tmp_path: Path, capsys) -> None:
    (folder / LIVE).unlink()
    (folder / "config.yaml").unlink()
    assert main(["view", "--live", str(folder)]) == 2
    assert "has no live.json" in capsys.readouterr().err
    assert main(["view", "--live", str(folder / "gone")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (folder / LIVE).write_text(
        json.dumps({"title": "x", "process": 1, "host": "h", "started": 0, "renewed": 0, "values": {"a": [1]}})
    )
    with pytest.raises(PlanError, match="another number of points"):
        load_live(folder)


def test_long_curves_become_thinner() -> None:
    state = LiveState("x", 1, "h", 0.0, 0.0)
    for step in range(1, 1001):
        state = state.at(step, {"loss": float(step)}, [], {})
    assert 200 <= len(state.steps) <= 400
    assert list(state.values["loss"]) == [float(step) for step in state.steps]
    assert state.steps == tuple(sorted(state.steps)) and state.step == 1000


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_records_itself(tmp_path: Path, fails: bool) -> None:
    class Stops(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 3:
                seen.append(load_live(tmp_path))
                if fails:
                    raise ValueError("on purpose")

    seen: list[LiveState] = []
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=5, log_every_n_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, strategy=PipelineStrategy(stages=1, microbatches=2),
        callbacks=[PipelineMonitor(1, tmp_path, title="mine"), Stops()],
    )  # fmt: skip
    if fails:
        with pytest.raises(ValueError, match="on purpose"):
            trainer.fit(Module(), loader("gpt", 48, 8))
    else:
        trainer.fit(Module(), loader("gpt", 48, 8))
    (during,) = seen
    assert (during.title, during.process, during.of, during.ended) == ("mine", os.getpid(), 5, None)
    after = load_live(tmp_path)
    assert after.ended == ("the job has failed with ValueError" if fails else "the job has ended")
    assert after.steps == tuple(range(1, 4 if fails else 6))
    assert after.values and all(len(curve) == len(after.steps) for curve in after.values.values())
    assert len(after.memory) == 1 and after.memory[0] > 0
