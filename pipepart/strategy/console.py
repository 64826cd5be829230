"""What the strategy tells the user on rank 0."""

from __future__ import annotations

import logging

from lightning.pytorch.utilities.rank_zero import rank_zero_only

__all__ = ["tell"]

_log = logging.getLogger("pipepart")
if not _log.handlers:  # shown by default, as Lightning's own messages are; users change it like any logger
    _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.INFO)
    _log.propagate = False


@rank_zero_only
def tell(text: str) -> None:
    _log.info(text)
