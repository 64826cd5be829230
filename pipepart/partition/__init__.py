"""Partition: where to cut a graph. Exact search over downsets, slices of linear orders, and a lower bound for both.

Knows numbers and a directed graph. Knows nothing of torch, schedules or processes.
"""

from pipepart.partition.baselines import baselines
from pipepart.partition.check import check
from pipepart.partition.problem import Device, Link, Problem, Tensor
from pipepart.partition.published import given_problem
from pipepart.partition.result import Partition
from pipepart.partition.solve import partition

__all__ = ["Device", "Link", "Partition", "Problem", "Tensor", "baselines", "check", "given_problem", "partition"]
