"""Plugin for pytest, loaded into the processes that run Lightning's own tests (`own.py` starts them).

It runs the tests of a list, writes one line of JSON for the start and the result of each, and, if asked to, replaces the
strategy of a Trainer whose test chooses none, and the layer of `BoringModel` by several layers.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

_WORDS = 600
"""Characters of an error that are kept."""
_GIVEN = json.loads(os.environ.get("PIPEPART_OWN_TESTS", "{}"))
"""What `own.py` asks for: only, report, stages, layers, folder."""
_RANK = os.environ.get("RANK", "0")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests of the list, if there is one, and no test whose parameters choose a strategy of several processes."""
    items[:] = [item for item in items if not _chooses_strategy(item)]
    if "only" in _GIVEN:
        wanted = set(json.loads(Path(_GIVEN["only"]).read_text()))
        items[:] = [item for item in items if {item.nodeid, item.nodeid.partition("[")[0]} & wanted]


def _chooses_strategy(item: Any) -> bool:
    chosen = item.callspec.params.get("strategy") if hasattr(item, "callspec") else None
    return isinstance(chosen, str) and chosen.startswith("ddp")


def pytest_collection_finish(session: Any) -> None:
    _write({"collected": [item.nodeid for item in session.items]})


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", "flaky: of a plugin that runs tests again, which is not needed here")
    if _GIVEN.get("layers"):
        _several_layers(int(_GIVEN["layers"]))
    if "report" in _GIVEN:
        _replace_the_default(int(_GIVEN.get("stages", 0)))


def _replace_the_default(stages: int) -> None:
    """Let a Trainer that would choose `SingleDeviceStrategy` on the CPU choose `PipelineStrategy(stages=...)`.

    With 0 stages nothing is replaced. In both cases it is noted that the test uses the default strategy.
    """
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    choose = _AcceleratorConnector._choose_strategy
    if stages:
        _note_written_steps()

    def ours(connector: Any) -> Any:
        chosen = choose(connector)
        if type(chosen) is SingleDeviceStrategy and chosen.root_device.type == "cpu":
            _uses_default.append(True)
            if stages:
                from pipepart import PipelineStrategy

                connector._parallel_devices = connector._parallel_devices * stages
                return PipelineStrategy(stages=stages)
        return chosen

    _AcceleratorConnector._choose_strategy = ours  # type: ignore[method-assign]


def _note_written_steps() -> None:
    """Note the tests with a step that is not recorded, and runs as it is written."""
    from pipepart.lightning.as_written import AsWritten

    say = AsWritten._tell

    def tell(self: AsWritten, module: Any, step: str, *args: Any, **kwargs: Any) -> None:
        _written.append(step)
        say(self, module, step, *args, **kwargs)

    AsWritten._tell = tell  # type: ignore[method-assign]


def _several_layers(count: int) -> None:
    """Give `BoringModel` this number of layers in place of one, so that it can be divided."""
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    before = BoringModel.__init__

    def init(self: Any) -> None:
        before(self)
        hidden = [torch.nn.Linear(32, 32) for _ in range(count - 1)]
        self.layer = torch.nn.Sequential(*hidden, torch.nn.Linear(32, 2))

    BoringModel.__init__ = init  # type: ignore[method-assign]


@pytest.fixture
def _folder_of_all_ranks(request: Any) -> Path | None:
    """The folder of this test, which is the same on all ranks; None if the test runs in one process."""
    if "folder" not in _GIVEN:
        return None
    folder = Path(_GIVEN["folder"]) / hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if "folder" in _GIVEN:

    @pytest.fixture
    def tmp_path(_folder_of_all_ranks: Path) -> Path:
        return _folder_of_all_ranks


_MEETING = 300.0
"""Seconds in which the other ranks come to a test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """All ranks begin a test together: else one may still hold the ports and files of the test before."""
    if "folder" not in _GIVEN:
        return
    folder = Path(_GIVEN["folder"]) / "meetings" / hashlib.sha256(item.nodeid.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RANK).touch()
    until = time.monotonic() + _MEETING
    while len(list(folder.iterdir())) < int(_GIVEN["stages"]):
        if time.monotonic() > until:
            raise TimeoutError(f"another rank has not come to {item.nodeid}")
        time.sleep(0.02)


# ---- results


_uses_default: list[bool] = []
"""Not empty if the present test has made a Trainer with the default strategy."""
_written: list[str] = []
"""The steps of the present test that are not recorded, and run as they are written."""


def _write(entry: dict[str, Any]) -> None:
    if "report" not in _GIVEN:
        return
    with open(f"{_GIVEN['report']}.{_RANK}", "a") as file:
        file.write(json.dumps(entry) + "\n")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _uses_default.clear()
    _written.clear()
    _write({"test": nodeid, "state": "started"})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        state = report.outcome if not hasattr(report, "wasxfail") else "skipped"
        entry: dict[str, Any] = {
            "test": item.nodeid, "state": state, "when": report.when, "seconds": round(call.duration, 2),
            "default": bool(_uses_default), "written": sorted(set(_written)),
        }  # fmt: skip
        if report.failed and call.excinfo is not None:
            entry.update(_reason(call.excinfo.value))
        _write(entry)


def _reason(error: BaseException) -> dict[str, Any]:
    """The words of a failure: of the first error of pipepart in its chain if there is one, else of the error itself."""
    chain, current = [error], error
    while (nested := current.__cause__ or current.__context__) is not None and nested not in chain:
        chain.append(nested)
        current = nested
    own = [one for one in chain if any(kind.__name__ == "PipepartError" for kind in type(one).__mro__)]
    shown = own[0] if own else error
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:]]
    return {"ours": bool(own), "kind": type(shown).__name__, "words": str(shown)[:_WORDS], "where": where}
