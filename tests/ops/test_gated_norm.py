"""The gated norm in C++ against the plain one: values, derivatives, strides, NaN, threads."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fastweights.ops.cpu import build
from fastweights.ops.fused.gated_norm import gated_rms_norm, plain_norm
from tests.ops.calls import gradients, relative_error

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

OPENINGS = [None, "silu", "sigmoid"]


def random_tensors(opening, shape=(2, 5, 3, 7), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(shape[3:], generator=generator, dtype=torch.float64).to(dtype)
    return [x.requires_grad_() for x in (x, weight, *([gate] if opening else []))]


def plain(opening, tensors, eps=1e-5, scale=1.0):
    gate = tensors[2] if opening else None
    return plain_norm(*tensors[:2], gate, opening, eps, scale)[0]


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("shape", [(2, 5, 3, 7), (1, 1, 1, 1), (1, 400, 2, 64)], ids=str)
def test_agrees_with_the_plain_one(opening, shape):
    tensors = random_tensors(opening, shape)
    found = gated_rms_norm(*tensors, opening=opening, scale=0.3)
    want = plain(opening, tensors, scale=0.3)
    assert relative_error([found, *gradients([found], tensors)], [want, *gradients([want], tensors)]) < 1e-13


@pytest.mark.parametrize("opening", OPENINGS)
def test_derivatives(opening):
    tensors = random_tensors(opening, (1, 2, 2, 3))

    def function(*tensors):
        return gated_rms_norm(*tensors, opening=opening)

    assert gradcheck(function, tensors, check_batched_grad=True)
    assert gradgradcheck(function, tensors)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_narrow_inputs_of_any_strides(dtype, tolerance):
    """A gate that is a part of a larger projection, as in a layer."""
    x, weight, gate = (x.detach() for x in random_tensors("silu", (2, 40, 3, 16), dtype))
    wide = torch.cat([gate.flatten(2), gate.flatten(2)], -1)
    strided = wide.split([10, 48, 38], -1)[1].unflatten(-1, (3, 16))
    exact = plain("silu", [x.double(), weight.double(), strided.double()])
    found = gated_rms_norm(x.transpose(0, 1).contiguous().transpose(0, 1), weight, strided, "silu")
    assert found.dtype == dtype and (found - exact).norm() < tolerance * exact.norm()


def test_gradients_of_many_heads_keep_their_digits():
    """Sums of so many numbers in float32, one after the other, are off by some hundred-thousandths."""
    x, weight = torch.rand(1, 500_000, 1, 1), torch.ones(1, requires_grad=True)
    exact = weight.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(gated_rms_norm(x, weight).sum(), weight)
    (want,) = torch.autograd.grad(plain(None, [x.double(), exact]).sum(), exact)
    assert relative_error([found], [want]) < 1e-6


def test_nan_stays_in_its_head():
    x, weight, gate = (x.detach() for x in random_tensors("silu"))
    clean = gated_rms_norm(x, weight, gate, "silu")
    x[1, 2, 1, 0], gate[0, 4, 2, 3] = float("nan"), float("inf")
    spoilt = gated_rms_norm(x, weight, gate, "silu")
    depends = torch.zeros_like(x, dtype=torch.bool)
    depends[1, 2, 1], depends[0, 4, 2, 3] = True, True
    assert torch.equal(~(clean == spoilt), depends)


def test_the_number_of_threads_changes_no_bit():
    tensors = random_tensors("sigmoid", (3, 70, 4, 50), torch.float32)
    results = []
    for threads in (1, 2, 4, 7):
        torch.set_num_threads(threads)
        y = gated_rms_norm(*tensors, opening="sigmoid")
        results.append([y, *gradients([y], tensors)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_errors():
    x, weight = torch.ones(1, 2, 3, 4), torch.ones(4)
    with pytest.raises(ValueError, match=r"weight \(M,\) .* got \(1, 2, 3, 4\), \(3,\), None"):
        gated_rms_norm(x, torch.ones(3))
    with pytest.raises(ValueError, match=r"gate must have the shape of x, \(1, 2, 3, 4\), got \(1, 2, 3, 5\)"):
        gated_rms_norm(x, weight, torch.ones(1, 2, 3, 5), "silu")
    with pytest.raises(ValueError, match="unknown opening 'slu'; did you mean 'silu'"):
        gated_rms_norm(x, weight, x, "slu")


def test_second_derivatives_where_the_gate_comes_from_the_input():
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 3, 2, 5), (5,)))
    assert gradgradcheck(lambda x, weight: gated_rms_norm(x, weight, x.cos(), "silu"), (x, weight))
    y = gated_rms_norm(x, weight, x.cos(), "silu")
    ways = torch.randn(3, *y.shape, dtype=torch.float64)
    loop = torch.stack([torch.autograd.grad(y, x, way, retain_graph=True)[0] for way in ways])
    (batched,) = torch.autograd.grad(y, x, ways, is_grads_batched=True)
    torch.testing.assert_close(batched, loop)
