"""The stand-in device obeys the rules of a GPU: each rule has a program that keeps it and one that breaks it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import run_standin
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.timeout(600)


def _error(function: Callable[[], Any], kind: type[BaseException] = RuntimeError) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    return "no error"


def _stream(index: int = 0) -> torch.Stream:
    return torch.Stream(device=f"standin:{index}")


# Tensors


def _tensors() -> dict[str, Any]:
    x = torch.arange(6.0, device="standin:1").reshape(2, 3)
    view = x.t()
    view[0, 0] = 7.0
    resized = torch.empty(0, device="standin:1")
    torch.add(x, x, out=resized)
    shared = torch.empty(0, device="standin:1").set_(x.untyped_storage(), 1, (2,), (1,))
    inplace = x.add_(1)
    return {
        "plain": type(x) is torch.Tensor,
        "device": (str(x.device), x.is_standin, torch.accelerator.current_accelerator().type),
        "view": x.data_ptr() == view.data_ptr() and x[0, 0].item() == 8.0,
        "inplace": inplace is x,
        "resized": resized.tolist(),
        "shared": shared.tolist(),
        "scalar": (x * torch.tensor(2.0)).sum().item(),
        "moved": x.to("standin:0").device.index,
        "back": torch.equal(x.cpu(), torch.tensor([[8.0, 2.0, 3.0], [4.0, 5.0, 6.0]])),
        "made": torch.tril_indices(3, 3, device="standin").device.index,
    }


def test_tensors_are_plain_ones_on_memory_of_the_device() -> None:
    (answer,) = run_standin(_tensors)
    assert answer == {
        "plain": True,
        "device": ("standin:1", True, "standin"),
        "view": True,
        "inplace": True,
        "resized": [[14.0, 2.0, 4.0], [6.0, 8.0, 10.0]],
        "shared": [2.0, 3.0],
        "scalar": 56.0,
        "moved": 0,
        "back": True,
        "made": 0,
    }


def _library_functions() -> dict[str, Any]:
    import io

    from torch._subclasses import FakeTensorMode
    from torch.utils.checkpoint import checkpoint

    first, second = nn.Linear(3, 4).to("standin:1"), nn.Linear(4, 2).to("standin:2")
    x = torch.randn(5, 3, device="standin:1")
    plain = second(first(x).relu().to("standin:2")).sum()
    plain.backward()
    expected = first.weight.grad.clone()
    first.weight.grad = None
    hidden = checkpoint(lambda t: nn.functional.dropout(first(t).relu(), 0.0), x, use_reentrant=False)
    second(hidden.to("standin:2")).sum().backward()
    file = io.BytesIO()
    torch.save({"x": x, "layer": first.state_dict()}, file)
    read = [torch.load(io.BytesIO(file.getvalue()), map_location=place)["x"] for place in (None, "cpu", "standin:3")]
    with FakeTensorMode():
        fake = nn.Linear(3, 4, device="standin:1")(torch.empty(2, 3, device="standin:1"))
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 3, device="standin:1"), torch.tensor([3, 1]), True)
    return {
        "devices of one graph": torch.equal(expected, first.weight.grad),
        "loaded": [str(one.device) for one in read],
        "equal": torch.equal(read[1], x.cpu()),
        "fake": (str(fake.device), tuple(fake.shape)),
        "from meta": str(nn.Linear(2, 2, device="meta").to_empty(device="standin:1").weight.device),
        "copied": str(copy.deepcopy(first).weight.device),
        "packed": str(nn.GRU(3, 2).to("standin:1")(packed)[0].data.device),
    }


def test_functions_of_torch_know_the_device() -> None:
    (answer,) = run_standin(_library_functions)
    assert answer == {
        "devices of one graph": True,
        "loaded": ["standin:1", "cpu", "standin:3"],
        "equal": True,
        "fake": ("standin:1", (2, 4)),
        "from meta": "standin:1",
        "copied": "standin:1",
        "packed": "standin:1",
    }


def _mixed() -> list[str]:
    here, there, host = torch.ones(2, device="standin:0"), torch.ones(2, device="standin:1"), torch.ones(2)
    layer = nn.Linear(2, 2).to("standin:0")
    generator = torch.Generator()
    return [
        _error(lambda: here + host),
        _error(lambda: torch.cat([here, there])),
        _error(lambda: layer(host)),
        _error(lambda: torch.empty(2, device="standin:0").normal_(generator=generator)),
    ]


def test_devices_do_not_mix() -> None:
    (errors,) = run_standin(_mixed)
    same = "Expected all tensors to be on the same device, but found at least two devices, standin:"
    assert same + "0 and cpu!" in errors[0]
    assert same in errors[1] and "standin:0" in errors[1] and "standin:1" in errors[1]
    assert same + "0 and cpu!" in errors[2]
    assert "Expected a 'standin' device type for generator but found 'cpu'" in errors[3]


# Training


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        q = h.unflatten(-1, (2, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(-2)
        return self.out(h[:, x[0] > 0].mean(1))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 6, 2, batch_first=True), nn.GRU(6, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x)[0])[0][:, -1]


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 4, 2),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def _trained(model: nn.Module, x: torch.Tensor, optimizer: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
    target = torch.tensor([0, 1, 2, 4], device=x.device)
    stepping = optimizer(model.parameters())
    losses = []
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        for _ in range(3):
            stepping.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stepping.step()
            losses.append(loss.detach())
    return [value.cpu() for value in [*losses, *model.state_dict().values()]]


def _training(kind: str) -> tuple[float, bool]:
    torch.manual_seed(3)
    model = {"attention": _Attention, "recurrent": _Recurrent, "convolutions": _convolutions}[kind]().double()
    shapes = {"recurrent": (4, 5, 4), "convolutions": (4, 3, 6, 6)}
    x = torch.randint(11, (4, 6)) if kind == "attention" else torch.randn(shapes[kind], dtype=torch.float64)
    worst, there = 0.0, True
    ways: list[Callable[..., torch.optim.Optimizer]] = [
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adam(p, foreach=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    ]
    for way in ways:
        ours = copy.deepcopy(model).to("standin:1")
        expected, got = _trained(copy.deepcopy(model), x, way), _trained(ours, x.to("standin:1"), way)
        there &= all(str(p.grad.device) == "standin:1" for p in ours.parameters() if p.grad is not None)
        worst = max([worst, *((a - b).abs().max().item() for a, b in zip(expected, got, strict=True))])
    return worst, there


@pytest.mark.parametrize(("kind", "tolerance"), [("attention", 0.0), ("convolutions", 0.0), ("recurrent", 1e-13)])
def test_training_in_float64_equals_the_cpu(kind: str, tolerance: float) -> None:
    """Recurrent cells are fused on devices other than the CPU, which adds the biases in another order."""
    (answer,) = run_standin(_training, kind)
    assert answer[0] <= tolerance and answer[1], answer


# Autocast


def _autocast() -> dict[str, Any]:
    layer, x = nn.Linear(4, 4).to("standin:0"), torch.randn(2, 4, device="standin:0")
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("standin", dtype=dtype):
            y = layer(x)
            found[str(dtype)] = [str(t.dtype) for t in (y, y.relu(), y.softmax(-1), F.layer_norm(y, (4,)), y.sum())]
        y.sum().backward()
    found["gradient"] = str(layer.weight.grad.dtype)
    found["refused"] = _error(lambda: _bce(x))
    return found


def _bce(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("standin", dtype=torch.bfloat16):
        return F.binary_cross_entropy(x.sigmoid(), x.sigmoid())


def test_autocast_has_the_usual_lists() -> None:
    (found,) = run_standin(_autocast)
    for name in ("torch.bfloat16", "torch.float16"):
        assert found[name] == [name, name, "torch.float32", "torch.float32", "torch.float32"]
    assert found["gradient"] == "torch.float32"
    assert "unsafe to autocast" in found["refused"]


def _scaler(fused: bool) -> tuple[list[float], bool]:
    layer = nn.Linear(3, 1).to("standin:0")
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1, fused=fused)
    scaler = torch.amp.GradScaler(device="standin", init_scale=8.0)
    scales, before = [], layer.weight.detach().clone()
    for bad in (False, True):
        optimizer.zero_grad()
        x = torch.full((2, 3), float("inf") if bad else 1.0, device="standin:0")
        scaler.scale(layer(x).sum()).backward()
        kept = layer.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, torch.equal(kept, layer.weight) and not torch.equal(before, layer.weight)


@pytest.mark.parametrize("fused", [False, True])
def test_the_scaler_skips_a_step_that_is_not_finite(fused: bool) -> None:
    (answer,) = run_standin(_scaler, fused)
    assert answer == ([8.0, 4.0], True)


# Generators and memory


def _generators() -> dict[str, bool]:
    standin = torch.get_device_module("standin")
    torch.manual_seed(5)
    first = torch.randn(4, device="standin:1")
    host = torch.get_rng_state()
    state = standin.get_rng_state(1)
    second, dropped = torch.rand(4, device="standin:1"), F.dropout(torch.ones(64, device="standin:1"))
    untouched = torch.equal(host, torch.get_rng_state())
    standin.set_rng_state(state, 1)
    again, dropped_again = torch.rand(4, device="standin:1"), F.dropout(torch.ones(64, device="standin:1"))
    torch.manual_seed(5)
    own = torch.Generator(device="standin:1").manual_seed(9)
    drawn = torch.randperm(9, generator=own, device="standin:1")
    return {
        "seeded": torch.equal(first, torch.randn(4, device="standin:1")),
        "state": torch.equal(second, again) and torch.equal(dropped, dropped_again),
        "host": untouched,
        "own": torch.equal(drawn, torch.randperm(9, generator=own.manual_seed(9), device="standin:1")),
    }


def test_each_device_draws_from_its_own_generator() -> None:
    (answer,) = run_standin(_generators)
    assert all(answer.values()), answer


def _memory() -> dict[str, Any]:
    from support import standin

    module = torch.get_device_module("standin")
    standin.set_memory(10_000, 1)
    x = torch.ones(1000, device="standin:1")
    found = {"allocated": module.memory_allocated(1), "free": module.mem_get_info(1)}
    found["error"] = _error(lambda: torch.empty(2000, device="standin:1"), torch.OutOfMemoryError)
    found["result"] = _error(lambda held=x: torch.cat([held, held]), torch.OutOfMemoryError)
    found["other"] = torch.empty(2000, device="standin:0").numel()
    y = x + 1
    found["peak"] = torch.accelerator.max_memory_allocated(1)
    del x, y
    return {**found, "after": torch.accelerator.memory_allocated(1)}


def test_memory_ends() -> None:
    (found,) = run_standin(_memory)
    assert found["allocated"] == 4000 and found["free"] == (6000, 10_000)
    assert "Tried to allocate 8000 bytes" in found["error"] and "out of memory" in found["result"]
    assert found["other"] == 2000 and found["peak"] == 8000 and found["after"] == 0


# Waits of the host


def _waits() -> dict[str, list[str]]:
    from support import standin

    x = torch.arange(4.0, device="standin:0")
    mask = x > 1
    host, pinned = torch.ones(4), torch.ones(4).pin_memory()
    event = torch.Event(device="standin:0")
    event.record()
    programs: dict[str, Callable[[], Any]] = {
        "compute": lambda: (x * 2).sum().mean(),
        "fill by a mask": lambda: x.clone().masked_fill_(mask, 0.0).__setitem__(mask, 0.0),
        "index": lambda: x[torch.arange(2, device="standin:0")],
        "pinned": lambda: x.copy_(pinned, non_blocking=True),
        "to pinned": lambda: x.to("cpu", non_blocking=True),
        "device to device": lambda: x.to("standin:1"),
        "event": lambda: event.query(),
        "item": lambda: x.sum().item(),
        "if": lambda: bool(x.sum() > 0),
        "tensor": lambda: torch.tensor(1.0, device="standin:0"),
        "blocking": lambda: x.copy_(host),
        "pageable": lambda: host.copy_(x, non_blocking=True),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[mask],
        "unique": lambda: x.unique(),
        "repeat": lambda: x.repeat_interleave(torch.ones(4, dtype=torch.long, device="standin:0")),
        "equal": lambda: torch.equal(x, x),
        "event.synchronize": lambda: event.synchronize(),
        "stream.synchronize": lambda: torch.accelerator.current_stream().synchronize(),
        "device.synchronize": lambda: torch.accelerator.synchronize(),
    }
    found = {}
    for name, program in programs.items():
        with standin.counting() as waits:
            program()
        found[name] = waits
    standin.keep_stacks()
    x.sum().item()
    found["stack"] = [str("x.sum().item()" in standin.stacks()[-1])]
    return found


def test_waits_of_the_host_are_counted() -> None:
    (found,) = run_standin(_waits)
    free = {"compute", "fill by a mask", "index", "pinned", "to pinned", "device to device", "event"}
    assert {name for name, waits in found.items() if not waits} == free
    assert found["item"] == found["if"] == ["aten::_local_scalar_dense"]
    assert found["blocking"] == found["tensor"] == ["copy cpu -> standin:0"]
    assert found["pageable"] == ["copy standin:0 -> cpu"]
    assert found["nonzero"] == ["aten::nonzero"] and found["mask"] == ["aten::index.Tensor"]
    assert all(found[name] == [name] for name in found if "synchronize" in name)
    assert found["stack"] == ["True"]


# Streams


def _races() -> dict[str, str]:
    """Each program breaks one rule, and must be found."""
    from support import standin

    found = {}

    def read_too_early() -> None:
        x, side = torch.ones(8, device="standin:0"), _stream()
        with side:
            x + 1

    def write_over_a_read() -> None:
        x, side = torch.ones(8, device="standin:0"), _stream()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x + 1
        x.zero_()

    def copy_to_the_host() -> None:
        x, side = torch.ones(8, device="standin:0"), _stream()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x.mul_(2)
        x.cpu()

    def old_event() -> None:
        x, side, event = torch.ones(8, device="standin:0"), _stream(), torch.Event(device="standin:0")
        event.record()
        x.mul_(2)
        side.wait_event(event)
        with side:
            x.sum()

    def freed_too_early() -> None:
        x, side = torch.ones(8, device="standin:0"), _stream()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x.sum()
        del x
        torch.empty(8, device="standin:0")

    def halves() -> None:
        x, side = torch.zeros(8, device="standin:0"), _stream()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x[:4].add_(1)
        x[3:].add_(1)

    def pinned() -> None:
        host = torch.ones(8).pin_memory()
        torch.empty(8, device="standin:0").copy_(host, non_blocking=True)
        host.zero_()
        torch.accelerator.synchronize()

    for program in (
        read_too_early,
        write_over_a_read,
        copy_to_the_host,
        old_event,
        freed_too_early,
        halves,
        pinned,
    ):
        found[program.__name__] = _error(program)
        torch.accelerator.synchronize()
        standin.reset_races()
    late = torch.ones(8, device="standin:0").to("cpu", non_blocking=True)
    found["late"] = str((late.isnan().all().item(), torch.accelerator.synchronize(), late.sum().item()))
    return found


def test_races_are_found() -> None:
    (found,) = run_standin(_races)
    assert "reads memory written by op aten::fill_" in found["read_too_early"]
    assert "without an event between them" in found["read_too_early"]
    assert "op aten::zero_ on stream standin:0/0 writes memory read by op aten::add" in found["write_over_a_read"]
    assert "copy standin:0 -> cpu" in found["copy_to_the_host"] and "aten::mul_" in found["copy_to_the_host"]
    assert "reads memory written by op aten::mul_" in found["old_event"]
    assert "freed while op aten::sum" in found["freed_too_early"] and "record_stream" in found["freed_too_early"]
    assert "writes memory written by op aten::add_" in found["halves"]
    assert "the host wrote over pinned memory" in found["pinned"]
    assert found["late"] == "(True, None, 8.0)"


def _ordered() -> tuple[list[str], list[str], float, float]:
    """Each program keeps the rules: nothing may be found, and the host waits for nothing."""
    from support import standin

    x, side, event = torch.ones(8, device="standin:0"), _stream(), torch.Event(device="standin:0")
    main = torch.accelerator.current_stream()
    with standin.counting() as waits:
        side.wait_stream(main)
        with side:
            y = x + 1
            event.record()
            z = y * 2
        main.wait_event(event)
        y.sum()  # written before the event; the side still reads it for `z`
        main.wait_stream(side)
        y.add_(1)
        total = z.sum()
        z.record_stream(main)
        with side:
            del z
            torch.empty(8, device="standin:0")
        buffer = torch.zeros(8, device="standin:0")
        side.wait_stream(main)
        with side:
            buffer[4:].add_(1)
            x.record_stream(side)
            x.sum()
        buffer[:4].add_(2)
        del x
        torch.empty(8, device="standin:0")
        weight = torch.ones(8, device="standin:0", requires_grad=True)
        side.wait_stream(main)
        with side:
            loss = (weight * 3).sum()
        main.wait_stream(side)
        loss.backward()
        grad = weight.grad.sum()
    return waits, standin.races(), total.item(), grad.item()


def test_programs_that_are_ordered_are_clean() -> None:
    (answer,) = run_standin(_ordered)
    assert answer == ([], [], 32.0, 24.0)


# Lightning


def _lightning() -> tuple[str, list[float]]:
    import lightning.pytorch as L
    from lightning.pytorch.strategies import DDPStrategy
    from support.standin.lightning_device import register_accelerator

    register_accelerator()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1).double()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Ddp(DDPStrategy):
        def determine_ddp_device_ids(self) -> None:
            """Lightning takes any device with an index for CUDA."""

    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            seen.append(str(module.layer.weight.device))

    trainer = L.Trainer(
        accelerator="standin",
        devices=2,
        strategy=Ddp(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Look()],
    )
    torch.manual_seed(1)
    module = Module()
    data = torch.randn(8, 4, dtype=torch.float64)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    return seen[-1], module.layer.weight.flatten().tolist()


def test_lightning_trains_on_it() -> None:
    """Two ranks with DDP, whose reductions go over the group of the device, have equal weights at the end."""
    first, second = run_standin(_lightning, ranks=2)
    assert first[0] == "standin:0" and second[0] == "standin:1"
    assert first[1] == second[1]
