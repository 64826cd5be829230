"""The command line: composes a configuration, starts the ranks of a run and shows its results.

Knows Hydra, files and the public surface. Decides nothing about models.
"""

from pipepart.cli.main import main

__all__ = ["main"]
