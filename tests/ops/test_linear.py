"""A linear layer by oneDNN against float64 and against PyTorch's own: values, gradients, and what it leaves alone."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastweights.ops.cpu import products
from fastweights.ops.fused.linear import linear, plain_linear

THERE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
FAST = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
pytestmark = pytest.mark.skipif(not (THERE and FAST), reason="for processors with AVX-512, by oneDNN")


def random_call(tokens=(3, 64), inner=96, columns=260, bias=True):
    """Return x, weight and bias of a product that oneDNN takes."""
    generator = torch.Generator().manual_seed(0)
    shapes = (*tokens, inner), (columns, inner), (columns,)
    x, weight, b = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return [x, weight, b] if bias else [x, weight]


def with_gradients(function, tensors, relu):
    y = function(*tensors, relu=relu)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad((y * weights).sum(), tensors)]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "inner", "columns"), [((3, 64), 96, 260), ((3, 64), 260, 96), ((1, 1), 500, 2100), ((9, 75), 330, 303)]
)
def test_is_as_exact_as_float32(relu, bias, tokens, inner, columns):
    tensors = random_call(tokens, inner, columns, bias)
    assert products.refuses(tokens[0] * tokens[1], columns, *tensors) is None
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = with_gradients(lambda x, w, b=None, relu=False: plain_linear(x, w, b, relu)[0], exact, relu)
    for ours, theirs in zip(with_gradients(linear, tensors, relu), want, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_strides_and_second_derivatives():
    x, weight, bias = random_call()
    turned = x.detach().mT.contiguous().mT.requires_grad_()
    torch.testing.assert_close(linear(turned, weight, bias), linear(x, weight, bias))
    (dx,) = torch.autograd.grad(linear(x, weight, bias, relu=True).square().sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(plain_linear(x, weight, bias, True)[0].square().sum(), x, create_graph=True)
    found, want = (torch.autograd.grad(d.square().sum(), weight)[0] for d in (dx, want))
    assert (found - want).norm() < 1e-6 * want.norm()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_frozen_tensors_cost_no_products(checkpointed, monkeypatch):
    made = []
    for name in ("product", "outer_product"):
        original = getattr(products, name)
        monkeypatch.setattr(products, name, lambda *x, name=name, f=original: made.append(name) or f(*x))
    for frozen, expected in ((0, ["outer_product"]), (1, ["product"])):
        tensors = random_call()
        want = torch.autograd.grad(plain_linear(*tensors, False)[0].square().sum(), tensors)
        tensors[frozen].requires_grad_(False)
        wanted = [i for i in range(3) if i != frozen]
        y = checkpoint(linear, *tensors, use_reentrant=False) if checkpointed else linear(*tensors)
        forward = len(made)
        found = torch.autograd.grad(y.square().sum(), [tensors[i] for i in wanted])
        assert made[forward:] == ["product"] * checkpointed + expected
        for ours, i in zip(found, wanted, strict=True):
            assert (ours - want[i]).norm() < 1e-6 * want[i].norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wanted", [[0], [1], [0, 1], [-1], [0, -1]])
def test_keeps_and_computes_what_plain_layers_do_when_tensors_are_frozen(wanted, bias):
    tensors, found = random_call(bias=bias), []
    wanted = sorted({i % len(tensors) for i in wanted})
    for i, x in enumerate(tensors):
        x.requires_grad_(i in wanted)
    for function in (linear, torch.nn.functional.linear):
        kept, inputs = [], [tensors[i] for i in wanted]
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            y = function(*tensors)
        first = torch.autograd.grad(y.square().sum(), inputs, retain_graph=True)
        again = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in again), inputs)
        found.append((sorted(kept), [*first, *again, *second]))
    (kept, gradients), (kept_there, gradients_there) = found
    assert kept == kept_there
    for ours, theirs in zip(gradients, gradients_there, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_retained_graphs_give_the_same_gradients_twice():
    tensors = random_call()
    y = linear(*tensors, relu=True).sum()
    first = torch.autograd.grad(y, tensors, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, tensors)))


def test_leaves_alone_what_it_is_not_for():
    x, weight, bias = random_call()
    for other in (x.double(), x.bfloat16(), x[:, :63]):
        assert products.refuses(other.numel() // 96, 260, other, weight.to(other.dtype)) is not None
    with torch.autocast("cpu"):
        assert linear(x, weight, bias).dtype == torch.bfloat16
