"""What is known of the published graphs: optimal values of their objective, and the time of the reference search."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LAYER_PROFILES", "OPERATOR_GRAPHS", "Reference"]


@dataclass(frozen=True)
class Reference:
    """The optimum of a graph: with the extra host device, and on the accelerators alone."""

    graph: str
    devices: int
    with_host: float
    accelerators: float
    seconds: float


OPERATOR_GRAPHS = (
    Reference("LayerGraphs_bert24_inference", 6, 17.7899, 17.789906, 0.007),
    Reference("LayerGraphs_bert24_training", 6, 41.7458, 41.745812, 0.017),
    Reference("LayerGraphs_resnet50_training", 6, 78.6318, 80.454887, 0.22),
    Reference("OperatorGraphs_bert_l-6_inference", 3, 29.5795, 33.989102, 3.8),
    Reference("OperatorGraphs_bert_l-3_training", 3, 65.3031, 65.303149, 7.0),
)

LAYER_PROFILES = {
    ("alexnet", 2): 43.075,
    ("gnmt", 4): 25.868,
    ("gnmt", 8): 19.032,
    ("resnet50", 4): 111.497,
    ("resnet50", 8): 58.447,
}
"""Milliseconds of the slowest chunk, compute only, best over the slices of one topological order."""
