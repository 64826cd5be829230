"""Code that remembers results by size: caches and tables neither break a recording nor keep anything of it."""

import functools
import gc

import pytest
import torch
import torch.nn as nn

from pipepart.errors import CaptureError
from pipepart.recording import GuardError, record
from pipepart.recording.recorded_run.symbols import Tracked
from tools.bench.zoo.checks import check_model


class Net(nn.Module):
    """Two layers with `middle` between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu())).pow(2).mean()


def example(batch, length=6):
    return (torch.randn(batch, length, 8),)


@functools.cache
def doubled(n, width):
    return n * 2, width


@functools.lru_cache(maxsize=8)
def triangle(n):
    return torch.ones(n, n).tril()


class Scales:
    @staticmethod
    @functools.cache
    def of(n):
        return (n - 1) / n + n**0.5


class CachedSizes(Net):
    def middle(self, x):
        n, width = doubled(x.shape[0], x.shape[1])
        return x.reshape(n // 2, width, 8) * (n / 4)


class CachedTensor(Net):
    def middle(self, x):
        return triangle(x.shape[1]) @ x


class CachedConstant(Net):
    def middle(self, x):
        return triangle(6) @ x


class CachedStaticMethod(Net):
    def middle(self, x):
        return x * Scales.of(len(x))


class CachedMethod(Net):
    @functools.cache  # noqa: B019
    def positions(self, n):
        return torch.arange(n).float().view(-1, 1)

    def middle(self, x):
        return x + self.positions(x.shape[1]) + self.positions(x.shape[0]).sum()


class CachedInClosure(Net):
    def __init__(self):
        super().__init__()
        self.middle = self._middle()

    def _middle(self):
        @functools.cache
        def positions(n):
            return torch.arange(n).float().view(-1, 1, 1)

        def middle(x):
            return x + positions(x.shape[0])

        return middle


class Table(Net):
    def __init__(self):
        super().__init__()
        self.masks = {}

    def middle(self, x):
        n = x.shape[1]
        if n not in self.masks:
            self.masks[n] = torch.ones(n, n).tril()
        return self.masks[n] @ x


class TableByBatch(Table):
    def middle(self, x):
        key = (x.shape[0], x.device)
        if key not in self.masks:
            self.masks[key] = torch.arange(len(x)).float().view(-1, 1, 1), len(x) + 1
        offsets, scale = self.masks[key]
        return (x + offsets) / scale


OFFSETS = {}


class GlobalTable(Net):
    def middle(self, x):
        if x.shape[0] not in OFFSETS:
            OFFSETS[x.shape[0]] = torch.arange(x.shape[0]).float().view(-1, 1, 1)
        return x + OFFSETS[x.shape[0]]


class Grows(Net):
    """A rotary cache: a table that is made longer when a longer sequence comes."""

    def __init__(self):
        super().__init__()
        self.longest = 0
        self.register_buffer("cosines", None, persistent=False)

    def middle(self, x):
        n = x.shape[1]
        if n > self.longest:
            self.longest = n
            self.cosines = torch.arange(n).float().cos().view(1, n, 1)
        return x * self.cosines[:, :n]


MODELS = [
    CachedSizes,
    CachedTensor,
    CachedConstant,
    CachedStaticMethod,
    CachedMethod,
    CachedInClosure,
    Table,
    TableByBatch,
    GlobalTable,
    Grows,
]


def forget():
    for function in (doubled, triangle, Scales.of):
        function.cache_clear()
    OFFSETS.clear()


@pytest.mark.parametrize(
    "warm", ["cold", *(pytest.param(how, marks=pytest.mark.slow) for how in ("warm", "warm at other sizes too"))]
)
@pytest.mark.parametrize("kind", MODELS)
def test_equal_whatever_is_remembered_before_and_after(kind, warm):
    forget()
    model = kind()
    if warm != "cold":
        model(*example(4))
    if warm == "warm at other sizes too":
        for batch, length in ((3, 6), (2, 6), (5, 6), (4, 3), (4, 12)):
            if kind is not CachedConstant:
                model(*example(batch, length))
    for _ in range(2):  # in one process, train and eval mode each
        report = check_model(kind.__name__, model, example, batch=4)
        assert report.captured, report.problems
        assert report.equal, report.problems
    forget()


@pytest.mark.parametrize("kind", [CachedSizes, CachedTensor, TableByBatch, GlobalTable])
def test_sizes_are_dynamic_not_only_guarded(kind):
    forget()
    model = kind()
    model(*example(4))
    recording = record(model, example(4))
    assert recording.inputs[0].dynamic[:2] == (True, True)
    for batch, length in ((4, 6), (3, 5), (7, 9)):
        args = example(batch, length)
        torch.testing.assert_close(recording.module()(*args), model(*args))
    forget()


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_of_a_recording_is_kept(kind):
    forget()
    model = kind()
    before = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    recording = record(model, example(4))
    del recording
    gc.collect()
    tracked = [item for item in gc.get_objects() if isinstance(item, Tracked)]
    assert all(number.make is None and number.owner is None for number in tracked)
    for function in (doubled, triangle):
        keys = [key for part in gc.get_referents(function) if type(part) is dict for key in part]
        assert not any(
            isinstance(item, Tracked) for key in keys for item in (key if isinstance(key, tuple) else (key,))
        )
    assert not OFFSETS
    assert {key: value for key, value in vars(model).items() if not key.startswith("_")} == before
    forget()


KEPT = []


def keep(number):
    KEPT.append(number)


def kept():
    return KEPT[0]


class Keeps(Net):
    def middle(self, x):
        keep(x.shape[0])
        return x


class UsesKept(Net):
    def middle(self, x):
        return x * (kept() + 0 * x.shape[0])


def test_a_number_of_a_finished_recording_is_a_plain_one_in_the_next():
    KEPT.clear()
    record(Keeps(), example(4))
    first = KEPT[0]
    assert isinstance(first, Tracked) and first == 4 and hash(first) == hash(4)
    assert type(first + 1) is int and type(2 / first) is float
    model = UsesKept()
    recording = record(model, example(3))
    for batch in (3, 2, 5):
        args = example(batch)
        torch.testing.assert_close(recording.module()(*args), model(*args))
    KEPT.clear()


class Lookup(Net):
    """A table that is only read: sizes it does not have are an error, or mean something else."""

    scales = {4: 3.0, 3: 5.0}

    def middle(self, x):
        return x * self.scales.get(x.shape[0], 1.0)


def test_a_table_that_is_only_read_is_not_emptied():
    with pytest.raises(CaptureError, match="depends on the batch size"):
        record(Lookup(), example(4))
    assert Lookup.scales == {4: 3.0, 3: 5.0}


class LookupOfLengths(Net):
    scales = {6: 3.0, 3: 5.0}

    def middle(self, x):
        return x * self.scales.get(x.shape[1], 1.0)


def test_a_table_of_lengths_that_is_only_read_fixes_the_length():
    model = LookupOfLengths()
    recording = record(model, example(4))
    torch.testing.assert_close(recording.module()(*(args := example(3))), model(*args))
    with pytest.raises(GuardError):
        recording.module()(*example(4, 3))


class Counts(Table):
    def middle(self, x):
        n = x.shape[0]
        self.masks[n] = self.masks.get(n, 0) + 1
        return x * self.masks[n]


class KeepsData(Table):
    def middle(self, x):
        n = x.shape[0]
        if n not in self.masks:
            self.masks[n] = x.detach().mean(0)
        return x - self.masks[n]


class KeepsDraws(Table):
    def middle(self, x):
        n = x.shape[1]
        if n not in self.masks:
            self.masks[n] = torch.rand(n, 1)
        return x * self.masks[n]


@functools.cache
def drawn(n):
    return torch.rand(n, 1)


class CachedDraws(Net):
    def middle(self, x):
        return x * drawn(x.shape[1])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Counts, "keeps no Python state"),
        (KeepsData, "depends on the contents of the batch|requires a gradient"),
        (KeepsDraws, "random numbers"),
        (CachedDraws, "draws random numbers"),
    ],
)
def test_what_is_no_function_of_sizes_is_refused(kind, text):
    drawn.cache_clear()
    model = kind()
    with pytest.raises(CaptureError, match=text):
        record(model, example(4))
    assert not getattr(model, "masks", None)
