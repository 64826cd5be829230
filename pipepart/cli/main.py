"""`pipepart COMMAND [overrides]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipepart.errors import PipepartError

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipepart", description="Pipeline-parallel training for any PyTorch model.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    train = commands.add_parser(
        "train",
        help="train a recipe on a pipeline of processes on this machine",
        description="Train a recipe. Overrides are Hydra's: pipepart train strategy.stages=4 devices=4 trainer.max_steps=50",
    )
    train.add_argument("overrides", nargs="*", help="key=value, group=option, +new.key=value")
    train.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    view = commands.add_parser("view", help="make the HTML page of a plan, a trace or a run folder")
    view.add_argument("source", help="plan.json, trace.json, or the output folder of a run")
    view.add_argument("-o", "--output", default=None, help="where to write the page (default: beside the source)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors that a user can mend are one clear message and exit code 2."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "train":
            from pipepart.cli.train import train

            return train(arguments.overrides, show_only=arguments.cfg)
        from pipepart.report import view

        print(view(arguments.source, arguments.output))
        return 0
    except PipepartError as error:
        print(f"pipepart {arguments.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
