"""The losses with label smoothing: the formula, its gradient by finite differences, and the kernels against float64."""

import pytest
import torch

from fastweights.ops.gpu.label_smoothing import launch
from fastweights.ops.gpu.label_smoothing.self_check import compare, refuses
from fastweights.ops.gpu.self_check import LIMITS
from fastweights.ops.losses.label_smoothing import dense_nll, smoothed_nll
from tests.layers.kernels import fits, record
from tests.ops.interpreted import inside, outside


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


@inside
def test_the_kernels():
    assert refuses(torch.zeros(1, 2)) is None
    for words in (5, launch.BLOCK, 2 * launch.BLOCK + 77):
        for name, error in compare(torch.float32, torch.device("cpu"), 4, words).items():
            assert error < LIMITS[torch.float32], (words, name, error)


@inside
@pytest.mark.parametrize("which", [0, 1])
def test_one_loss_alone_of_logits_that_are_no_block_of_memory(which):
    logits = torch.randn(3, 40, 2).transpose(1, 2).requires_grad_()
    targets = torch.randint(40, (3, 2))
    ours, theirs = (nll(logits, targets, 0.1)[which] for nll in (smoothed_nll, dense_nll))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), logits)[0] for x in (ours, theirs)))


@inside
def test_targets_that_are_no_block_of_memory_and_words_that_are_ruled_out():
    """A whole block of them, the target's not among them."""
    logits = torch.randn(4, 1, launch.BLOCK + 9)
    targets = (launch.BLOCK + torch.randint(9, (4, 2)))[:, :1]
    torch.testing.assert_close(smoothed_nll(logits, targets, 0.1), dense_nll(logits, targets, 0.1))
    logits[..., : launch.BLOCK] = -torch.inf
    ours, theirs = (nll(logits.requires_grad_(), targets, 0.0) for nll in (smoothed_nll, dense_nll))
    assert all(x.isfinite().all() for x in theirs)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(x[0].sum(), logits)[0] for x in (ours, theirs)))


@pytest.mark.slow
@outside
def test_compiles_for_hopper(monkeypatch):
    pytest.importorskip("triton")
    from fastweights.ops.gpu.label_smoothing import kernels

    calls = record(monkeypatch, kernels, "row_losses", "row_gradients")
    logits = torch.empty(24_576, 32_000, dtype=torch.bfloat16, device="meta")
    targets = torch.empty(24_576, dtype=torch.int64, device="meta")
    losses = launch.forward(logits, targets, 0.1)
    launch.backward(losses.smoothed, losses.nll, logits, targets, losses.totals, 0.1)
    fits(calls, 2)
