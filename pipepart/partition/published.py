"""A problem from a graph that was read from a file."""

from __future__ import annotations

import math

import numpy as np

from pipepart.cost.given import GivenDevice, GivenGraph
from pipepart.partition.problem import Device, Link, Problem, Tensor

__all__ = ["given_problem"]


def given_problem(graph: GivenGraph, *, host: bool = True, link: Link | None = None) -> Problem:
    """The problem of a published graph: on its own devices if the file names some, else on equal ones without limit.

    ``host``: also offer the device that is not an accelerator. Where the file gives the cost of tensors, it is what
    each chunk pays; else ``link`` says it (free if left out).
    """
    costs = graph.costs
    backward = np.array(costs.backward)
    devices: tuple[Device, ...] = (Device(),)
    if graph.devices:
        offered = [d for d in graph.devices if host or d.communicates]
        devices = tuple(device for d in offered for device in [_device(d, backward > 0)] * d.count)
    if not host and devices[0].forward is not None:
        devices = devices[:1]
    return Problem(
        forward=np.array(costs.forward),
        backward=backward,
        parameter_bytes=np.array(costs.parameter_bytes),
        saved_bytes=np.array(costs.saved_bytes),
        output_bytes=np.array(costs.output_bytes),
        edges=graph.edges,
        colocated=graph.colocated,
        tensors=None if graph.tensors is None else tuple(Tensor(t.ops, t.size) for t in graph.tensors),
        links=(link or Link(math.inf if graph.tensors is None else 1.0),),
        devices=devices,
        any_order=len(devices) > 1,
        fewer=bool(graph.devices),
        names=costs.names,
    )


def _device(given: GivenDevice, backward: np.ndarray) -> Device:
    seconds = np.array(given.seconds)
    return Device(
        name=given.name,
        memory=given.memory,
        forward=np.where(backward, 0.0, seconds),
        backward=np.where(backward, seconds, 0.0),
        communicates=given.communicates,
    )
