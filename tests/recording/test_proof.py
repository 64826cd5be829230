"""The proof of a recording is sound: whatever is changed in a recording is found, and the op at fault is named."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipepart.errors import CaptureError
from pipepart.graph import op_graph
from pipepart.recording import prove, prove_chunks, record, split
from pipepart.recording.op import op_of, set_op
from pipepart.recording.recorded_run.intrinsics import call_object


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Subject(nn.Module):
    """A bit of everything that a recording must get right."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.rand(6) + 1)
        self.shift = nn.Parameter(torch.rand(6) + 1)
        self.register_buffer("mean", torch.zeros(6))
        self.block = nn.Sequential(nn.Linear(6, 6), nn.GELU())
        self.head = nn.Linear(6, 3)

    def forward(self, x, y):
        h = self.a(x).tanh()
        h.register_hook(lambda gradient: gradient * 2)
        h = Thrice.apply(h)
        h = self.norm(h)
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        with torch.no_grad():
            target = torch.sigmoid(self.b(h))
        h = F.dropout(h, 0.3, self.training)
        h = h * self.scale - self.shift
        h = h.float().double()
        z = self.block(h).clone()
        z[:, 0] = 1.5
        z.mul_(2.0)
        z = torch.sub(z, self.c(h))
        weights = torch.softmax(z, dim=-1)
        frozen = z.detach()
        out = self.head(z * weights + 0.01 * frozen)
        return F.cross_entropy(out, y, label_smoothing=0.1) + (target - z).pow(2).mean() + out.std() * 0.3


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x, y):
        h = self.a(x).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.nn.functional.linear(h, self.b.weight)
        return (h.float() * 7.0).square().mean()


def example(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(5, 6, dtype=dtype), torch.randint(0, 3, (5,))


def node(recording, match):
    """The only op whose name fits."""
    found = [n for n in recording.ops if re.fullmatch(match, n.name)]
    assert len(found) == 1, (match, [n.name for n in recording.ops])
    return found[0]


def put_after(recording, source, target, args=(), method=False):
    """An op between a value and all that uses it."""
    with recording.graph.inserting_after(source):
        make = recording.graph.call_method if method else recording.graph.call_function
        new = make(target, (source, *args))
    source.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    new.args = (source, *args)
    copy_meta(source, new)
    return new


def copy_meta(source, new):
    new.meta = dict(source.meta)
    set_op(new, dataclasses.replace(op_of(source)))


def set_keyword(recording, name, **values):
    found = node(recording, name)
    assert set(values) <= set(found.kwargs)
    found.kwargs = {**found.kwargs, **values}


def drop(recording, match):
    victim = node(recording, match)
    for user in list(victim.users):
        user.replace_input_with(victim, victim.all_input_nodes[0])
    recording.graph.erase_node(victim)


# Each mutation changes one thing in a recording of `Subject`, and returns the op that must be named.


def detached_edge(r):
    put_after(r, node(r, "dropout"), "detach", method=True)
    return "mul|detach_2"


def detached_edge_below_all(r):
    put_after(r, node(r, "norm"), "detach", method=True)
    return "dropout"


def detached_edge_to_one_user(r):
    source, user = node(r, "softmax"), node(r, "mul_1")
    with r.graph.inserting_after(source):
        new = r.graph.call_method("detach", (source,))
    copy_meta(source, new)
    user.replace_input_with(source, new)
    return "mul_1"


def detached_edge_of_a_sum(r):
    put_after(r, node(r, "mul_1"), "detach", method=True)
    return "add"


def scaled_gradient(r):
    put_after(r, node(r, "double"), Thrice.apply)
    return "block_0"


def other_function(r):
    node(r, "thrice_apply").target = Once.apply
    return "thrice_apply"


def skipped_function(r):
    drop(r, "thrice_apply")
    return "thrice_apply"


def skipped_hook(r):
    r.graph.erase_node(node(r, "register_hook"))
    return "register_hook"


def other_hook(r):
    constant = node(r, "register_hook").args[1]
    r.constants[str(constant.target)] = lambda gradient: gradient * 2.1
    return "register_hook"


def wrong_training_flag(r):
    set_keyword(r, "dropout", training=False)
    return "dropout"


def wrong_dropout_rate(r):
    set_keyword(r, "dropout", p=0.31)
    return "dropout"


def swapped_parameter(r):
    attributes = {str(n.target): n for n in r.graph.nodes if n.op == "get_attr"}
    with r.graph.inserting_before(node(r, "mul")):
        new = r.graph.create_node("get_attr", "shift")
    new.meta = dict(attributes["shift"].meta)
    node(r, "mul").replace_input_with(attributes["scale"], new)
    return "mul|detach_2"


def swapped_module(r):
    node(r, "c").target = "b"
    return "c"


def lost_in_place_write(r):
    drop(r, "mul__1")
    return "mul__1"


def lost_item_assignment(r):
    drop(r, "setitem")
    return "setitem"


def dropped_op(r):
    drop(r, "block_1")
    return "block_1"


def swapped_arguments(r):
    found = node(r, "sub_1")
    found.args = (found.args[1], found.args[0])
    return "sub_1"


def changed_constant(r):
    found = node(r, "mul_2")
    found.args = (found.args[0], 0.0100001)
    return "mul_2"


def changed_keyword(r):
    set_keyword(r, "cross_entropy", label_smoothing=0.1000001)
    return "cross_entropy"


def changed_dimension(r):
    set_keyword(r, "softmax", dim=0)
    return "softmax"


def lost_no_grad(r):
    for n in r.ops:
        set_op(n, dataclasses.replace(op_of(n), grad_mode=True))
    return "b"


def added_no_grad(r):
    softmax = node(r, "softmax")
    set_op(softmax, dataclasses.replace(op_of(softmax), grad_mode=False))
    return "softmax"


def lost_detach(r):
    drop(r, "detach_1")
    return "detach_1"


def missing_buffer_update(r):
    r.graph.erase_node(node(r, "add_"))
    return "add_"


def other_buffer_update(r):
    set_keyword(r, "add_", alpha=0.11)
    return "add_"


def other_momentum(r):
    norm = r.root.norm
    r.constants["_norm"] = lambda x: F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.2
    )
    found = node(r, "norm")
    with r.graph.inserting_before(found):
        call = r.graph.create_node("get_attr", "_norm")
    found.op, found.target, found.args = "call_function", call_object, (call, *found.args)
    return "norm"


def lost_cast(r):
    drop(r, "float_1")
    return "float_1"


def wrong_dtype(r):
    node(r, "float_1").target = "bfloat16"
    return "float_1"


def other_op(r):
    node(r, "std").target = "var"
    return "std"


def other_activation(r):
    found = node(r, "block_1")
    found.op, found.target = "call_function", F.silu
    return "block_1"


def other_input(r):
    node(r, "sub_2").replace_input_with(node(r, "sub_1"), node(r, "mul__1"))
    return "sub_2"


def hook_on_what_has_no_gradient(r):
    put_after(r, node(r, "a"), "detach", method=True)
    return "tanh|register_hook"


MUTATIONS = [
    detached_edge, detached_edge_below_all, detached_edge_to_one_user, detached_edge_of_a_sum, scaled_gradient,
    other_function, skipped_function, skipped_hook, other_hook, wrong_training_flag, wrong_dropout_rate,
    swapped_parameter, swapped_module, lost_in_place_write, lost_item_assignment, dropped_op, swapped_arguments,
    changed_constant, changed_keyword, changed_dimension, lost_no_grad, added_no_grad, lost_detach,
    missing_buffer_update, other_buffer_update, other_momentum, lost_cast, wrong_dtype, other_op, other_activation,
    other_input, hook_on_what_has_no_gradient,
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_mutation_is_found_and_the_op_is_named(mutation):
    model, args = Subject().double(), example()
    recording = record(model, args)
    assert prove(recording, model, args) == ()
    lines = {n.name: op_of(n).source for n in recording.ops if n.op != "output"}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = mutation(recording)
    with pytest.raises(CaptureError) as caught:
        prove(recording, model, args)
    text = str(caught.value)
    named = re.findall(r"op (\w+) \(module", text)
    assert named and re.fullmatch(names, named[0]), text
    assert lines[named[0]] in text
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_wrong_autocast_is_found():
    model, args = Cast(), example(torch.float32)
    recording = record(model, args)
    for n in recording.ops:
        set_op(n, dataclasses.replace(op_of(n), autocast=()))
    with pytest.raises(CaptureError, match=r"op linear \(module '' at test_proof.py"):
        prove(recording, model, args)


def test_the_gradient_of_an_input_is_compared():
    class Model(nn.Module):
        def forward(self, x):
            return (Thrice.apply(x) * 2).sum(1)

    model, x = Model(), torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    recording = record(model, (x,))
    assert prove(recording, model, (x,)) == ()
    node(recording, "thrice_apply").target = Once.apply
    with pytest.raises(CaptureError, match=r"gradient of input x differs.*\n.*op thrice_apply"):
        prove(recording, model, (x,))


def test_none_and_zeros_are_not_the_same_gradient():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x).sum() + (self.unused(x) * 0.0).detach().sum()

    model, x = Model(), torch.randn(3, 2)
    recording = record(model, (x,))
    drop(recording, "detach")
    with pytest.raises(CaptureError, match=r"gradient of unused.weight is present, but the model gives none"):
        prove(recording, model, (x,))


def test_a_model_that_cannot_run_backward_is_recorded_with_a_note():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            h = self.layer(x).exp()
            return h.add_(1).sum()

    model, x = Model(), torch.randn(3, 2)
    with pytest.raises(RuntimeError):
        model(x).backward()
    assert any(note.startswith("gradients: not proved") for note in record(model, (x,)).notes)


# Chunks: what is changed in one of three chunks of `Subject`, and what the error must say.


def without_edge(chunks, name):
    """No gradient is sent back over an edge."""

    def cut(edges):
        return tuple(dataclasses.replace(e, grad_targets=()) if e.name == name else e for e in edges)

    return tuple(dataclasses.replace(c, imports=cut(c.imports), exports=cut(c.exports)) for c in chunks)


def at_input(chunks, index, name, target, args=(), method=False):
    graph = chunks[index].module.graph
    source = next(n for n in graph.nodes if n.op == "placeholder" and n.name == name)
    with graph.inserting_after(source):
        new = (graph.call_method if method else graph.call_function)(target, (source, *args))
    source.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    chunks[index].module.recompile()
    return chunks


def change(chunks, index, match, **values):
    found = next(n for n in chunks[index].module.graph.nodes if n.name == match)
    found.kwargs = {**found.kwargs, **values}
    chunks[index].module.recompile()
    return chunks


def forget_parameter(chunks, name):
    return tuple(dataclasses.replace(c, parameters=tuple(p for p in c.parameters if p != name)) for c in chunks)


def thrice(x):
    return Thrice.apply(x)


CHUNK_MUTATIONS = {
    "no gradient comes back": (lambda c: without_edge(c, "norm"), "no gradient comes back for op norm"),
    "no gradient for one of two": (lambda c: without_edge(c, "double"), "no gradient comes back for op double"),
    "detached inside": (lambda c: at_input(c, 1, "norm", "detach", method=True), "comes back for op norm"),
    "scaled gradient": (lambda c: at_input(c, 2, "double", thrice), "comes back for op double"),
    "scaled value": (lambda c: at_input(c, 1, "norm", torch.mul, (1.001,)), "the value of op (sigmoid|double)"),
    "other rate": (lambda c: change(c, 1, "dropout", p=0.31), "the value of op double"),
    "parameter left out": (lambda c: forget_parameter(c, "head.weight"), "gradient of head.weight"),
    "statistics": (lambda c: change(c, 0, "add_", alpha=0.2), "buffer mean"),
}


def three_chunks(model, args):
    recording = record(model, args)
    graph = op_graph(recording)
    names = [op.name for op in graph.ops]
    ends = names.index("add_"), names.index("double")
    wish = [sum(position > end for end in ends) for position in range(len(names))]
    chunk_of = graph.repaired(wish)
    return recording, chunk_of, split(recording, chunk_of, 3)


@pytest.mark.parametrize("name", CHUNK_MUTATIONS)
def test_a_mutation_of_a_chunk_is_found(name):
    model, args = Subject().double(), example()
    recording, chunk_of, chunks = three_chunks(model, args)
    leaves = recording.flatten(args)
    prove_chunks(recording, chunks, chunk_of, leaves)
    mutate, words = CHUNK_MUTATIONS[name]
    with pytest.raises(CaptureError, match=words) as caught:
        prove_chunks(recording, mutate(chunks), chunk_of, leaves)
    assert "cut into 3 chunks" in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_random_numbers_in_another_order_of_chunks_are_no_difference():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            left = F.dropout(self.a(x), 0.5)
            right = F.dropout(self.b(x), 0.5)
            left = F.dropout(self.c(left), 0.5)
            return (left * self.d(right)).sum()

    model, args = Towers().double(), example()[:1]
    recording = record(model, args)
    second = {"b", "dropout_1", "d", "mul", "sum_1"}
    chunk_of = {n.name: int(n.name in second) for n in recording.ops}
    assert prove_chunks(recording, split(recording, chunk_of, 2), chunk_of, recording.flatten(args)) is None
