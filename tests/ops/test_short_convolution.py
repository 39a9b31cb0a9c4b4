"""The short convolution in C++ against the plain one: every kind of mark, derivatives, NaN, threads and forks."""

import os

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fastweights.ops.cpu import build
from fastweights.ops.fused.short_convolution import plain_convolution, short_convolution
from tests.ops.calls import gradients, relative_error

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

MARKS = ["none", "mask", "starts", "both", "packed", "packed ends early"]


def random_call(marks, B=2, T=9, C=5, taps=4, dtype=torch.float64):
    """x, weight, bias, recent, and the keywords of a call."""
    generator = torch.Generator().manual_seed(0)
    packed = marks.startswith("packed")
    B, N = (1, 4) if packed else (B, B)
    sizes = (B, T, C), (C, taps), (C,), (N, taps - 1, C)
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    how = {}
    if marks in ("mask", "both") or packed:
        how["mask"] = torch.rand(B, T, generator=generator) < 0.7
    if marks in ("starts", "both") or packed:
        how["starts"] = torch.rand(B, T, generator=generator) < 0.2
    if packed:
        how["cu_seqlens"] = torch.tensor([0, 0, 3, T - 1, T] if marks == "packed" else [0, 3, 3, T - 2, T - 2])
    return [x.requires_grad_() for x in tensors], how


def plain(tensors, silu, mask=None, cu_seqlens=None, starts=None):
    return plain_convolution(*tensors, mask, cu_seqlens, starts, silu)


def everything(outputs, tensors):
    return [*outputs, *gradients(outputs, tensors)]


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize(("C", "taps"), [(5, 4), (130, 2), (64, 16), (3, 17)])
def test_agrees_with_the_plain_one(marks, silu, C, taps):
    """Also with more taps than the C++ has room for, which PyTorch then takes."""
    tensors, how = random_call(marks, C=C, taps=taps)
    found = everything(short_convolution(*tensors, silu=silu, **how), tensors)
    assert relative_error(found, everything(plain(tensors, silu, **how), tensors)) < 1e-13


@pytest.mark.parametrize("run", [plain, lambda tensors, silu, **how: short_convolution(*tensors, silu=silu, **how)])
def test_tokens_after_the_last_bound_are_in_no_text(run):
    tensors, how = random_call("packed ends early")
    x, *others = tensors

    def squares(x):
        y, recent_end = run([x, *others], True, cu_seqlens=how["cu_seqlens"])
        loss = y.square().sum() + recent_end.square().sum()
        return [y[:, :7], recent_end, *torch.autograd.grad(loss, tensors)], y[:, 7:]

    alone, _ = squares(x[:, :7])
    with torch.no_grad():
        x[:, 7:] = float("nan")
    found, rest = squares(x)
    assert not rest.any() and relative_error(found, alone) < 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_narrow_inputs_are_summed_in_float32(dtype, tolerance):
    tensors, how = random_call("both", T=700, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = plain(exact, True, **how)
    found = short_convolution(*tensors, silu=True, **how)
    weights = [torch.randn(y.shape).to(dtype) for y in want]
    for ours, theirs in zip(
        (*found, *torch.autograd.grad(found, tensors, weights)),
        (*want, *torch.autograd.grad(want, exact, [w.double() for w in weights])),
        strict=True,
    ):
        assert (ours - theirs).norm() < tolerance * theirs.norm()


def test_gradients_of_a_long_text_keep_their_digits():
    """Sums of 20,000 numbers in float32, one after the other, are off by several millionths."""
    tensors, _ = random_call("none", B=1, T=20_000, C=2, taps=2, dtype=torch.float32)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    found = torch.autograd.grad(short_convolution(tensors[0].square(), *tensors[1:])[0].sum(), tensors[1:3])
    want = torch.autograd.grad(plain([exact[0].square(), *exact[1:]], False)[0].sum(), exact[1:3])
    assert relative_error(found, want) < 5e-7


@pytest.mark.parametrize("marks", ["none", "packed"])
def test_derivatives(marks):
    """The second ones, and those of batches of gradients, are the plain one's."""
    tensors, how = random_call(marks, T=6, C=2, taps=3)

    def function(*tensors):
        return short_convolution(*tensors, silu=True, **how)

    assert gradcheck(function, tensors, check_batched_grad=True)
    assert gradgradcheck(function, tensors)


def test_segments_are_the_whole():
    tensors, _ = random_call("none", T=11)
    x, weight, bias, recent = tensors
    whole = everything(short_convolution(*tensors, silu=True), tensors)
    for cuts in ([1, 2, 8], [4, 7], [1] * 11):
        ys, state = [], recent
        for part in x.split([*cuts, 11 - sum(cuts)] if sum(cuts) < 11 else cuts, 1):
            y, state = short_convolution(part, weight, bias, state, silu=True)
            ys.append(y)
        assert relative_error(everything([torch.cat(ys, 1), state], tensors), whole) < 1e-13


def test_nan_reaches_only_what_sees_it():
    tensors, how = random_call("mask", T=12)
    how["mask"][:] = True
    how["mask"][1, 6], how["starts"] = False, torch.zeros(2, 12, dtype=torch.bool)
    how["starts"][0, 7] = True
    clean = everything(short_convolution(*tensors, silu=True, **how), tensors)
    with torch.no_grad():
        tensors[0][0, 5, 2] = tensors[0][1, 6] = float("nan")
    spoilt = everything(short_convolution(*tensors, silu=True, **how), tensors)
    for a, b in zip(clean[:2], spoilt[:2], strict=True):
        seen = torch.zeros_like(a, dtype=torch.bool)
        if a.shape[1] == 12:
            seen[0, 5:7, 2] = True
        assert torch.equal(~(a == b), seen)
    # Inputs whose outputs are all finite have the gradients that they had.
    assert torch.equal(clean[2][1], spoilt[2][1]) and torch.equal(clean[2][0, 7:], spoilt[2][0, 7:])


def test_the_number_of_threads_changes_no_bit():
    tensors, how = random_call("both", B=11, T=60, C=200)
    results = []
    for threads in (1, 2, 4, 7):
        torch.set_num_threads(threads)
        results.append(everything(short_convolution(*tensors, silu=True, **how), tensors))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_process_that_was_forked_computes_too(monkeypatch):
    """Threads are not there after a fork, and nobody waits for them; PyTorch's own functions would."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.set_num_threads(2)
    x, weight = torch.randn(4, 300, 200), torch.randn(200, 4)
    y, _ = short_convolution(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if (short_convolution(x, weight)[0].numpy() == y.numpy()).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.ones(2, 9)}, r"x must have shape \(B, T, C\), got \(2, 9\)"),
        ({"weight": torch.ones(4, 3)}, r"weight must have shape \(C, taps\) = \(5, 2 or more\), got \(4, 3\)"),
        ({"bias": torch.ones(4)}, r"bias must have shape \(C,\) = \(5,\), got \(4,\)"),
        ({"recent": torch.ones(2, 2, 5)}, r"recent must have shape \(N, taps - 1, C\) = \(2, 3, 5\)"),
        ({"mask": torch.ones(2, 9)}, r"mask must be a bool tensor of shape \(B, T\) = \(2, 9\), .* got torch.float32"),
        ({"recent": None, "cu_seqlens": torch.tensor([0, 3, 9])}, "packed along T with B = 1"),
        ({"cu_seqlens": torch.tensor([0.0, 2.0, 9.0])}, "cu_seqlens must be an int32 or int64 tensor"),
        (
            {"x": torch.ones(1, 9, 5), "recent": None, "cu_seqlens": torch.tensor([0, 10])},
            "rise from 0 to T = 9 or less",
        ),
    ],
)
def test_errors(wrong, message):
    tensors, _ = random_call("none")
    given = dict(zip(("x", "weight", "bias", "recent"), tensors, strict=True))
    with pytest.raises((ValueError, TypeError), match=message):
        short_convolution(**{**given, **wrong})
