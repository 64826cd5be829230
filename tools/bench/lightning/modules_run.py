"""Run a case: on one device and on 2 stages, each rank in a child process, with a time limit; then compare.

A host process for each library imports it once and forks the children of its cases. A crash is a finding, not the end.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from pipepart.runtime.addresses import free_port
from tools.bench.lightning.modules_case import Case
from tools.bench.lightning.modules_compare import Answer, Row, judge

__all__ = ["rows"]

SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "precision": "64-true",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "log_every_n_steps": 1,
    "max_epochs": 2,
    "limit_train_batches": 4,
    "limit_val_batches": 2,
    "limit_test_batches": 2,
    "limit_predict_batches": 2,
    "num_sanity_val_steps": 0,
}


def rows(module: str, names: Sequence[str], timeout: float) -> Iterator[Row]:
    """The rows of the cases of one library, whose cases are in `module`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    host = context.Process(target=_host, args=(theirs, module, list(names), timeout))
    host.start()
    theirs.close()
    left = list(names)
    try:
        while left:
            if not ours.poll(2 * timeout + 120):
                yield Row(left.pop(0), "crash", ["the processes of this case did not end in time"])
                break
            row = ours.recv()
            left.remove(row.name)
            yield row
    except (EOFError, ConnectionError):
        yield Row(left.pop(0), "crash", ["the process of its library died"])
    finally:
        host.join(0.0 if left else 10.0)
        host.kill()
        host.join(10)
    for name in left:
        yield Row(name, "crash", ["not tried: the process of its library has ended"])


def _host(connection: Connection, module: str, names: list[str], timeout: float) -> None:
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    declared = importlib.import_module(module)
    cases, missing, state = declared.CASES, "", "missing"
    try:
        declared.load()  # once for all children
        for name in ("lightning.pytorch", "pytorch_lightning", "pipepart"):
            importlib.import_module(name)
    except ImportError as error:
        missing = str(error)
    except Exception as error:
        missing, state = f"{type(error).__name__}: {error}", "broken"
    for name in names:
        if missing:
            connection.send(Row(name, state, [missing]))
            continue
        started = time.perf_counter()
        row = judge(cases[name], _answers(cases[name], timeout))
        row.seconds = time.perf_counter() - started
        connection.send(row)


def _answers(case: Case, timeout: float) -> list[Answer]:
    """Of one device, and of the two ranks of a pipeline. The runs follow each other: the machine may have few cores."""
    return [*_together(case, [None], timeout), *_together(case, [0, 1], timeout)]


def _together(case: Case, ranks: Sequence[int | None], timeout: float) -> list[Answer]:
    context: Any = multiprocessing.get_context("fork")
    answers: dict[Any, Answer] = {}
    with tempfile.TemporaryDirectory(prefix="modules-") as folder:
        port = free_port()
        processes, connections = [], {}
        for rank in ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_child, args=(theirs, case, rank, port, folder))
            process.start()
            theirs.close()
            processes.append(process)
            connections[ours] = rank
        deadline = time.monotonic() + timeout
        while len(answers) < len(ranks):
            open_ones = [connection for connection, rank in connections.items() if rank not in answers]
            ready = wait(open_ones, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                answers.update({r: Answer("no end", "no answer in time") for r in ranks if r not in answers})
            for connection in ready:
                rank = connections[connection]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[rank] = Answer("died", _tail(folder, rank))
                if answers[rank].kind != "done":
                    deadline = min(deadline, time.monotonic() + 30.0)  # the other one must not wait long for this one
        for process in processes:
            process.kill()
            process.join(10)
        for rank in ranks:
            answers[rank].said = _said(folder, rank)
    return [answers[rank] for rank in ranks]


def _child(connection: Connection, case: Case, rank: int | None, port: int, folder: str) -> None:
    """One process of a run. Everything that it prints goes to a file, and all files go to the folder of the run."""
    output = open(_log(folder, rank), "w", buffering=1)  # noqa: SIM115
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.chdir(folder)
    try:
        connection.send_bytes(pickle.dumps(_run(case, rank, port)))  # by value: this process ends
    except BaseException as error:
        from pipepart.errors import PipepartError

        traceback.print_exc()
        kind = "refused" if isinstance(error, PipepartError) else "failed"
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if kind == "refused" else f" ({os.path.basename(where.filename)}:{where.lineno})"
        answer = Answer(kind, f"{type(error).__name__}: {' '.join(str(error).split())}{place}")
        connection.send_bytes(pickle.dumps(answer))
    os._exit(0)  # threads of libraries must not keep the process


def _run(case: Case, rank: int | None, port: int) -> Answer:
    import lightning
    import torch

    from pipepart import PipelineStrategy
    from tools.bench.lightning.modules_watch import fixed_draws, watched_trainers

    for name in ("torch", "lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("always", module="pipepart")
    torch.set_num_threads(1)
    if rank is not None:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
            TORCHELASTIC_RUN_ID="modules", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    if case.draws:
        fixed_draws()

    def strategy() -> Any:
        return PipelineStrategy(**{"stages": 2, "microbatches": case.microbatches, **case.strategy})

    record = watched_trainers({**SETTINGS, **case.trainer}, None if rank is None else strategy, not case.draws)
    lightning.seed_everything(0)
    case.program()
    return Answer("done", record=record)


def _log(folder: str, rank: int | None) -> str:
    return os.path.join(folder, f"output-{rank}.txt")


def _tail(folder: str, rank: int | None) -> str:
    with open(_log(folder, rank), errors="replace") as file:
        return " ".join(file.read()[-300:].split()) or "the process died without a word"


def _said(folder: str, rank: int | None) -> list[str]:
    """The notes and warnings of pipepart in the output of a process."""
    with open(_log(folder, rank), errors="replace") as file:
        text = file.read()
    if os.environ.get("MODULES_OUTPUT"):
        with open(os.environ["MODULES_OUTPUT"], "a") as kept:
            kept.write(f"==== {rank}\n{text}\n")
    lines = [line.strip() for line in text.splitlines()]
    notes = (line for line in lines if line.startswith("note ") or "SamplesMeet" in line)
    return list(dict.fromkeys(note for note in notes if "dimension of size" not in note))  # sizes that cannot change
