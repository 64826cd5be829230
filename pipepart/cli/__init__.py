"""The command line: composes a configuration, starts the ranks of a run and shows its results.

The package knows Hydra, files and all other packages. It must not know how models are recorded or planned.
"""

from pipepart.cli.main import main

__all__ = ["main"]
