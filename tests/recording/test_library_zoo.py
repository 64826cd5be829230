"""A part of the zoo of libraries: captured equal, and on two real stages equal to one process on the whole batch."""

import pytest
from support.ranks import run_ranks

from tools.bench.zoo import libraries
from tools.bench.zoo.checks import check_model
from tools.bench.zoo.pipelines import Share, check_share, together

QUICK = ["einops.mixer"]
SLOW = ["transformers.gpt2", "transformers.llama", "transformers.bert"]


def test_the_zoo_is_large_enough():
    assert len(libraries.ARCHITECTURES) >= 60
    assert len(libraries.LIBRARIES) >= 12


def share_of(name: str) -> Share:
    return check_share(libraries.ARCHITECTURES[name])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_captured_and_on_two_stages(name):
    pytest.importorskip(name.partition(".")[0])
    report = check_model(name, *libraries.ARCHITECTURES[name]())
    assert report.equal, report.problems
    shares = run_ranks(2, share_of, name, timeout=240)
    assert together(shares) == ("equal", [])
    assert all(share.held for share in shares), "both stages hold parameters"
    assert {share.dtype for share in shares} <= {"float64", "mixed"}, (
        "mixed: transformers computes this loss in float32"
    )


def test_findings_of_ranks_are_put_together():
    equal = Share(held=("a",), expected=("a", "b"))
    other = Share(held=("b",), expected=("a", "b"))
    assert together([equal, other]) == ("equal", [])
    assert together([equal, equal]) == ("differs", ["no stage has a gradient of ['b']"])
    assert together([equal, Share(problems=["loss"], held=("b",), expected=("a", "b"))]) == ("differs", ["loss"])
    assert together([Share(refused="no"), other]) == ("refused", ["no"])
    assert together([Share(), Share()])[0] == "differs", "a model without gradients shows nothing"
