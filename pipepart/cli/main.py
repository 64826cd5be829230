"""`pipepart COMMAND [overrides]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipepart.errors import PipelineError, PipepartError, did_you_mean
from pipepart.secrets import clean_output, redacted_override
from pipepart.values import printable

__all__ = ["main"]

_COMMANDS = {
    "train": "train a recipe on a pipeline of processes",
    "plan": "plan a recipe, or any module, for this machine or for a cluster; starts no process",
    "verify": "compare a pipeline with one process on the whole batch: loss, logs, gradients; trains nothing",
    "view": "make the HTML page of a plan, a trace or a run folder",
    "export": "write the network of a checkpoint as ONNX, safetensors, a folder of transformers or a pt2 program, compared",
    "predict": "the outputs of a checkpoint's network for a file of inputs, in the order of its rows",
    "bench": "time a recipe at several shapes and schedules, side by side",
    "recipes": "list the recipes",
    "doctor": "check the installation, devices, backends, ports and shared memory, with a remedy for each problem",
    "selftest": "prove the devices, transports, schedules and failure handling of this machine with real runs; a few minutes",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. An error of the user is one message, with exit code 2 (wrong request) or 1 (failed)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from pipepart import __version__

        print(f"pipepart {__version__}")
        return 0
    command, rest = words[0], words[1:]
    clean_words = [redacted_override(word) for word in words]  # also remembers their secrets
    if argv is None:
        sys.argv[1:] = clean_words  # libraries record the command line
    with clean_output():
        return _run(command, rest)


def _run(command: str, words: list[str]) -> int:
    def tell(text: str) -> None:
        print(printable(text, keep="\n\t"), file=sys.stderr)

    if command not in _COMMANDS:
        tell(f"pipepart: there is no command {command!r}; {did_you_mean(command, _COMMANDS)}")
        return 2
    try:
        return _RUN[command](words)
    except PipepartError as error:
        tell(f"pipepart {command}: {error}")
        return 1 if isinstance(error, PipelineError) else 2
    except KeyboardInterrupt:
        tell(f"pipepart {command}: stopped")
        return 130
    except BrokenPipeError:  # the reader of the output (head, less) has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _overview() -> str:
    lines = [f"  {name:<8}  {text}" for name, text in _COMMANDS.items()]
    return "\n".join(
        [
            "pipepart: pipeline-parallel training for any PyTorch model.",
            "",
            "usage: pipepart COMMAND [overrides] [options]",
            "",
            *lines,
            "",
            "  pipepart train                                          the default recipe on two processes",
            "  pipepart train recipe=unet strategy.stages=4 trainer.max_steps=100",
            "  pipepart train -m strategy.schedule=gpipe,1f1b          a sweep",
            "  pipepart COMMAND --help                                 the arguments of a command",
        ]
    )


def _parser(command: str, examples: str = "", lazily: Callable[[], str] | None = None) -> argparse.ArgumentParser:
    class Help(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
            print(parser.format_help() + (lazily() if lazily is not None else ""))
            parser.exit()

    parser = argparse.ArgumentParser(
        prog=f"pipepart {command}",
        description=_COMMANDS[command].capitalize() + "." + (f"\n\n{examples}" if examples else ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", nargs=0, action=Help, help="show this text and stop")
    return parser


def _configured(command: str, examples: str) -> argparse.ArgumentParser:
    def more() -> str:
        from pipepart.cli.groups import group_help

        return f"\ngroups and their options (group=option; `pipepart recipes` describes the recipes):\n{group_help()}"

    parser = _parser(command, examples, more)
    parser.add_argument("overrides", nargs="*", help="key=value, group=option, +new.key=value, ~key (as in Hydra)")
    parser.add_argument("--cfg", choices=["job"], help="print the resolved configuration and stop")
    parser.add_argument(
        "--config-dir", type=Path, help="a folder with your own recipes and options, with the layout of conf/"
    )
    return parser


def _train(words: list[str]) -> int:
    parser = _configured(
        "train",
        "  pipepart train recipe=gpt data.path=my_book.txt\n"
        "  pipepart train recipe=unet strategy.stages=4 trainer.max_steps=100\n"
        "  pipepart train strategy=hybrid                      two pipelines of two stages\n"
        "  pipepart train -m strategy.schedule=gpipe,1f1b      a sweep, with a table at the end\n"
        "  pipepart train resume=outputs/latest/checkpoints/last.ckpt strategy.stages=4\n"
        "  torchrun --nproc-per-node 2 -m pipepart.cli train recipe=mlp\n"
        "  pipepart train launcher=nodes launcher.nodes=2 launcher.address=HOST:29400 devices=8   (on both machines)\n"
        "  pipepart train -m launcher=slurm devices=8 hydra.launcher.partition=gpu\n"
        "  pipepart train launcher=ray devices=8 launcher.address=auto",
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="a run for every combination of key=a,b,c")
    given = parser.parse_intermixed_args(words)
    if given.cfg:
        return _show_config(given)
    from pipepart.cli.config import is_sweep

    if given.multirun or is_sweep(given.overrides, given.config_dir):
        from pipepart.cli.sweep import sweep

        return sweep(given.overrides, given.config_dir)
    from pipepart.cli.train import train

    return train(given.overrides, given.config_dir)


def _show_config(given: argparse.Namespace, *command: str) -> int:
    from pipepart.cli.train import show_config

    return show_config(given.overrides, given.config_dir, *command)


def _plan(words: list[str]) -> int:
    parser = _configured(
        "plan",
        "  pipepart plan recipe=gpt strategy.stages=4\n"
        "  pipepart plan recipe=gpt cluster=h100 devices=8 -o plan.json\n"
        "  pipepart plan my_package.models:make_model cluster=a100_80 devices=4\n"
        "  pipepart plan recipe=gpt cluster=h100 devices=8 --export megatron\n\n"
        "module:callable names a function without arguments that returns (module, example arguments).",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("-o", "--output", type=Path, help="write the plan to this file")
    parser.add_argument(
        "--export", choices=("megatron", "torchtitan", "torch"), help="print the plan in the form of another library"
    )
    parser.add_argument("--snap", action="store_true", help="with --export: move cuts inside a layer to its border")
    given = parser.parse_intermixed_args(words)
    if given.cfg:
        return _show_config(given, "plan")
    from pipepart.cli.dry_runs import plan

    return plan(given.overrides, given.config_dir, given.json, given.output, given.export, given.snap)


def _verify(words: list[str]) -> int:
    parser = _configured(
        "verify",
        "  pipepart verify recipe=gpt strategy.stages=2\n"
        "  pipepart verify my_package.models:make_model strategy.stages=2 strategy.microbatches=4\n\n"
        "module:callable names a function without arguments that returns (module, example arguments).",
    )
    given = parser.parse_intermixed_args(words)
    if given.cfg:
        return _show_config(given)
    from pipepart.cli.dry_runs import verify

    return verify(given.overrides, given.config_dir)


def _view(words: list[str]) -> int:
    parser = _parser(
        "view",
        "  pipepart view outputs/latest                          report.html beside the plan\n"
        "  pipepart view outputs/latest --text                   table and chart in this terminal\n"
        "  pipepart view plan.json --compare other.json -o both.html\n"
        "  pipepart view outputs/latest --svg plan.svg --perfetto trace.json\n"
        "  pipepart view --live outputs/latest                   the page of a running job, on this host only",
    )
    parser.add_argument("source", help="plan.json, trace.json, or the output folder of a run")
    parser.add_argument("-o", "--output", help="file of the page (default: report.html beside the source)")
    parser.add_argument("--compare", help="a second plan or run folder, shown beside the first")
    parser.add_argument("--title", help="title of the page, the picture and the trace")
    parser.add_argument("--text", action="store_true", help="print table and chart to the terminal")
    parser.add_argument("--svg", help="write the partition and its schedule as a picture")
    parser.add_argument("--theme", choices=["light", "dark"], default="light", help="colours of the picture")
    parser.add_argument("--perfetto", help="write a trace for ui.perfetto.dev")
    parser.add_argument("--live", action="store_true", help="serve the page of a running job until it ends")
    parser.add_argument("--port", type=int, default=0, help="port of --live on 127.0.0.1 (default: one that is free)")
    given = vars(parser.parse_args(words))
    live, port, _ = (given.pop(name) for name in ("live", "port", "help"))
    if live:
        from pipepart.cli.live_server import serve_live

        serve_live(given["source"], port)
        return 0
    from pipepart.cli.view import view_files

    view_files(**given)
    return 0


_OVERRIDES = "the configuration (default: config.yaml of the run); allow=[package]"


def _export(words: list[str]) -> int:
    from pipepart.cli.saved_networks import Request, add_request

    parser = _parser(
        "export",
        "  pipepart export outputs/latest --to onnx\n"
        "  pipepart export outputs/latest/checkpoints/last.ckpt --to onnx --quantize int8 -o model.onnx\n"
        "  pipepart export somewhere.ckpt --to pt2 recipe=gpt model.width=256\n"
        "  pipepart export somewhere.ckpt --to onnx --class my_package.models:MyLightningModule\n\n"
        "CHECKPOINT is a file, a sharded folder, or the folder of a run.",
    )
    parser.add_argument("checkpoint", type=Path, help="a plain or sharded checkpoint, or the folder of a run")
    parser.add_argument("overrides", nargs="*", help=_OVERRIDES)
    parser.add_argument("--to", required=True, help="onnx, safetensors, hf or pt2")
    parser.add_argument("--quantize", help="weights in fewer bits: int8 or int4")
    parser.add_argument("-o", "--output", type=Path, help="what is written (default: beside the checkpoint)")
    add_request(parser)
    given = vars(parser.parse_intermixed_args(words))
    from pipepart.cli.exporting import export

    return export(Request.taken(given), given["to"], given["quantize"], given["output"])


def _predict(words: list[str]) -> int:
    from pipepart.cli.saved_networks import Request, add_request

    parser = _parser(
        "predict",
        "  pipepart predict outputs/latest points.csv                      points-predictions.csv\n"
        "  pipepart predict outputs/latest codes.safetensors -o scores.safetensors --batch 256\n"
        "  pipepart predict mine.ckpt rows.jsonl --class my_package.models:MyLightningModule\n\n"
        "FILE has one row for each prediction: csv, jsonl, npy or safetensors (docs/predict.md).",
    )
    parser.add_argument("checkpoint", type=Path, help="a plain or sharded checkpoint, or the folder of a run")
    parser.add_argument("file", type=Path, help="the inputs: csv, jsonl, npy or safetensors")
    parser.add_argument("overrides", nargs="*", help=_OVERRIDES)
    parser.add_argument("-o", "--output", type=Path, help="csv, jsonl, npy or safetensors (default: beside FILE)")
    parser.add_argument("--batch", type=int, default=64, help="rows that are computed together (default 64)")
    add_request(parser)
    given = vars(parser.parse_intermixed_args(words))
    from pipepart.cli.predicting import predict

    return predict(Request.taken(given), given["file"], given["output"], given["batch"])


def _bench(words: list[str]) -> int:
    if words[:1] == ["schedules"]:
        from pipepart.cli.bench import bench_schedules

        return bench_schedules(words[1:])
    parser = _configured(
        "bench",
        "  pipepart bench recipe=gpt\n"
        "  pipepart bench recipe=unet devices=4 --steps 40\n"
        "  pipepart bench schedules [--stages 4 8] [--gantt zb_v]   (simulated: bubble and memory of all schedules)\n\n"
        "Trains for a few steps as one process, as replicas only, and as pipelines with each schedule.",
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default 20)")
    given = parser.parse_intermixed_args(words)
    if given.cfg:
        return _show_config(given)
    from pipepart.cli.bench import bench

    return bench(given.overrides, given.config_dir, given.steps)


def _recipes(words: list[str]) -> int:
    parser = _parser("recipes")
    parser.add_argument("--config-dir", type=Path, help="a folder with your own recipes, with the layout of conf/")
    given = parser.parse_args(words)
    from pipepart.cli.groups import recipes_text

    print(recipes_text(given.config_dir))
    return 0


def _doctor(words: list[str]) -> int:
    parser = _parser("doctor")
    parser.add_argument("--quick", action="store_true", help="start no processes")
    given = parser.parse_args(words)
    from pipepart.cli.doctor import doctor

    return doctor(try_processes=not given.quick)


def _selftest(words: list[str]) -> int:
    parser = _parser(
        "selftest",
        "  pipepart selftest                       all devices of this machine, or its cores\n"
        "  pipepart selftest --quick               under a minute on two cores\n"
        "  pipepart selftest --device cpu --devices 4\n\n"
        "The results are in OUTPUT/selftest.json, the measured machine is in OUTPUT/cluster/measured.yaml.",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices (default: all; 2 to 4 for the CPU)")
    parser.add_argument("--device", metavar="TYPE", help="type of the devices (default: the accelerator, else cpu)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, shapes and schedules of each model")
    parser.add_argument("--output", type=Path, default=Path("outputs/selftest"), help="folder for the results")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for each check (default 120)"
    )
    parser.add_argument(
        "--import", dest="libraries", action="append", default=[], metavar="MODULE",
        help="import this module first, for devices that torch does not load by itself",
    )  # fmt: skip
    given = parser.parse_args(words)
    from pipepart.cli.selftest import selftest

    return selftest(**{name: value for name, value in vars(given).items() if name != "help"})


_RUN = {
    "train": _train,
    "plan": _plan,
    "verify": _verify,
    "view": _view,
    "export": _export,
    "predict": _predict,
    "bench": _bench,
    "recipes": _recipes,
    "doctor": _doctor,
    "selftest": _selftest,
}
