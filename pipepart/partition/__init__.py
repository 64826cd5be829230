"""Partition: assigns the ops of a graph to chunks, with a lower bound of the bottleneck.

::

    problem        Problem: seconds, bytes and edges of ops; devices, links, memory
       |
    units          UnitGraph: ops that stay in one chunk, as one acyclic graph
    unit_costs     UnitCosts: whole-number costs of units and tensors; the load of a chunk
    device_orders  DeviceOrders: the places that chunks take, or every way through a pool of devices
       |
    prepared       Prepared: reduced costs and the sets of downsets (states) to search
      linear_orders    the prefixes of one linear order
      downsets         all downsets, or any chosen set
       |
    bottleneck     best_path: the smallest bottleneck over all paths through a set of states, exactly
    improve        a better path near a known one
       |
    solve          partition(): tries the sets of states in turn; gives path, bound and method
    shortage       the error if nothing fits into memory
       |
    result         Partition: chunk of each op, loads, bottleneck, bound; baselines() to compare with
    check          check(): compares a partition with its problem, independently of the search

The package knows numbers and a directed graph. It must not know torch, schedules or processes.
"""

from pipepart.partition.check import check
from pipepart.partition.problem import Device, Link, Problem, Tensor, given_problem
from pipepart.partition.result import Partition, baselines
from pipepart.partition.solve import partition

__all__ = ["Device", "Link", "Partition", "Problem", "Tensor", "baselines", "check", "given_problem", "partition"]
