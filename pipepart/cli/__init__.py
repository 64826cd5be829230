"""The command line."""

from pipepart.cli.main import main

__all__ = ["main"]
