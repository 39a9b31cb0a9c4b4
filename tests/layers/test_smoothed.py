"""The losses with label smoothing: the formula, its gradient by finite differences, and the kernels against float64."""

import os
import subprocess
import sys

import pytest
import torch

from fastweights.layers.smoothed import smoothed_nll


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_is_cross_entropy_against_the_smoothed_target(smoothing):
    logits = torch.randn(3, 4, 7, dtype=torch.float64)
    targets = torch.randint(7, (3, 4))
    wanted = smoothing / 7 + (1 - smoothing) * torch.nn.functional.one_hot(targets, 7)
    smoothed, nll = smoothed_nll(logits, targets, smoothing)
    torch.testing.assert_close(smoothed, -(wanted * logits.log_softmax(-1)).sum(-1))
    torch.testing.assert_close(nll, -logits.softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1).log())


def test_gradients():
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: smoothed_nll(x, targets, 0.1), (logits,))


def test_16_bit_logits_have_losses_in_32():
    smoothed, nll = smoothed_nll(torch.randn(2, 5).bfloat16(), torch.tensor([1, 2]), 0.1)
    assert smoothed.dtype == nll.dtype == torch.float32


INTERPRETED = """
import torch
from fastweights.layers import smoothed
assert smoothed.refuses(torch.zeros(1, 2)) is None
for words in (5, smoothed.BLOCK, 2 * smoothed.BLOCK + 77):
    for name, error in smoothed.compare(torch.float32, torch.device("cpu"), 4, words).items():
        assert error < smoothed.LIMITS[torch.float32], (words, name, error)
# One of the two losses alone, rows in two dimensions, and logits that are no block of memory.
logits = torch.randn(3, 40, 2).transpose(1, 2).requires_grad_()
targets = torch.randint(40, (3, 2))
for which in (0, 1):
    ours = smoothed.smoothed_nll(logits, targets, 0.1)[which]
    theirs = smoothed.dense_nll(logits, targets, 0.1)[which]
    torch.testing.assert_close(ours, theirs)
    grads = (torch.autograd.grad(x.square().sum(), logits)[0] for x in (ours, theirs))
    torch.testing.assert_close(*grads)
# Targets that are no block of memory, and words that are ruled out: a whole block of them, the target's not among them.
logits = torch.randn(4, 1, smoothed.BLOCK + 9)
targets = (smoothed.BLOCK + torch.randint(9, (4, 2)))[:, :1]
torch.testing.assert_close(smoothed.smoothed_nll(logits, targets, 0.1), smoothed.dense_nll(logits, targets, 0.1))
logits[..., :smoothed.BLOCK] = -torch.inf
ours, theirs = (nll(logits.requires_grad_(), targets, 0.0) for nll in (smoothed.smoothed_nll, smoothed.dense_nll))
assert all(x.isfinite().all() for x in theirs)
torch.testing.assert_close(ours, theirs)
torch.testing.assert_close(*(torch.autograd.grad(x[0].sum(), logits)[0] for x in (ours, theirs)))
"""


def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compiles_for_hopper(monkeypatch):
    pytest.importorskip("triton")
    from fastweights.layers import smoothed, smoothed_kernels
    from tests.layers.test_adaptive_fused import Recorder
    from tests.ops.test_triton_aot import SHARED, build

    calls = []
    for name in ("row_losses", "row_gradients"):
        monkeypatch.setattr(smoothed_kernels, name, Recorder(getattr(smoothed_kernels, name), calls))
    logits = torch.empty(24_576, 32_000, dtype=torch.bfloat16, device="meta", requires_grad=True)
    losses, nll = smoothed._Fused.apply(logits, torch.empty(24_576, dtype=torch.int64, device="meta"), 0.1)
    (losses.sum() + nll.sum()).backward()
    assert len(calls) == 2
    for kernel, arguments, options in calls:
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        positional = [named.pop(name) for name in kernel.arg_names]
        built = build((kernel, positional, named), 90)
        assert built.metadata.shared <= SHARED[90] and "cubin" in built.asm, kernel.__name__
