"""Containers are opened and built again without calling what does not fit."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from support.containers import KINDS, Named, batch_of, content

from pipepart.recording.inputs import trees
from pipepart.recording.inputs.batching import Batching, batching_of, leaf_name


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_is_built_again_around_other_contents(kind: str) -> None:
    batch = batch_of(kind, content(7))
    leaves, tree = trees.flatten(batch)
    smaller = trees.unflatten([leaf[:2] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)
    assert type(smaller) is type(batch)
    assert trees.flatten(smaller)[1] == tree
    assert [leaf.shape[0] for leaf in trees.leaves_of(smaller) if isinstance(leaf, torch.Tensor)] == [2, 2]
    assert [leaf.shape[0] for leaf in trees.leaves_of(batch) if isinstance(leaf, torch.Tensor)] == [7, 7]


def test_what_a_container_carries_besides_its_contents_is_kept_and_not_shared() -> None:
    named = batch_of("named", content(3))
    named.seen = ["a"]
    again = trees.map_structure(lambda leaf: leaf, named)
    again["new"] = 1
    again.seen.append("b")
    assert again.kind == "train"
    assert "new" not in named
    assert named.seen == ["a"]
    assert trees.map_structure(lambda leaf: leaf, batch_of("own", content(3))).source == "file"
    derived = trees.map_structure(lambda leaf: leaf, batch_of("derived", content(3)))
    assert not hasattr(derived, "later")  # as in the original


def test_defaults_of_dicts_are_kept() -> None:
    found: Any = collections.defaultdict(list, {"x": torch.ones(2)})
    assert trees.map_structure(lambda leaf: leaf, found)["other"] == []


def test_samples_are_what_most_leaves_have() -> None:
    leaves = [torch.ones(3), torch.ones(8, 2), "text", torch.ones(8), torch.tensor(1.0)]
    paths = ["batch['weights']", "batch['x']", "batch['name']", "batch['y']", "batch['scale']"]
    assert batching_of(leaves, paths) == Batching((None, 0, None, 0, None), 8)
    assert batching_of(leaves, paths, {"x": 0, "y": None}) == Batching((None, 0, None, None, None), 8)
    assert leaf_name("batch['x'][0]['a b']") == "x.0.a b"
    assert isinstance(batch_of("named", content(2)), Named)
