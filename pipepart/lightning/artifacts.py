"""Files of a run as artifacts of Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["log_files"]


def log_files(logger: Any, name: str, kind: str, files: dict[str, Path], metadata: dict[str, Any]) -> None:
    """Log files as one artifact of the run. HTML pages are also shown as panels. Only rank 0 calls it."""
    import wandb

    artifact = wandb.Artifact(name, type=kind, metadata=metadata)
    for label, path in files.items():
        artifact.add_file(str(path), name=label)
    logger.experiment.log_artifact(artifact)
    for label, path in files.items():
        if path.suffix == ".html":
            logger.experiment.log({f"pipepart/{Path(label).stem}": wandb.Html(path.read_text(), inject=False)})
