"""A kernel of a layer that is wrong on this machine is found, reported and never used; no GPU needed to see that."""

from dataclasses import replace

import pytest
import torch

import fastweights as fw
from fastweights.layers.adaptive import AdaptiveSoftmax
from fastweights.layers.feedforward import FeedForward
from fastweights.ops.features import Features
from fastweights.ops.gpu import device, self_check
from fastweights.ops.gpu.adaptive_softmax import self_check as adaptive
from fastweights.ops.gpu.features import self_check as features
from fastweights.ops.gpu.feedforward import self_check as feedforward
from fastweights.ops.gpu.gated_norm import self_check as gated_norm
from fastweights.ops.gpu.label_smoothing import self_check as smoothing
from fastweights.ops.gpu.linear_attention import launch
from fastweights.ops.gpu.linear_attention import self_check as linear
from fastweights.ops.gpu.short_convolution import self_check as convolution
from fastweights.ops.losses.label_smoothing import dense_nll, smoothed_nll

CPU = torch.device("cpu")
ELU = Features.named("elu")
CHECKS = {
    "adaptive": adaptive.check_of(torch.bfloat16, torch.float32, 128),
    "feedforward": feedforward.check_of(128, 2048, 0.1),
    "smoothing": smoothing.check_of(torch.bfloat16),
    "convolution": convolution.check_of(convolution.Kind(torch.bfloat16, 4, True)),
    "features": features.check_of(torch.bfloat16, torch.bfloat16, 128, "silu", "l2"),
    "gated norm": gated_norm.check_of(torch.bfloat16, 128, "silu"),
    "linear attention": linear.check_of(launch.Call(launch.WEIGHTS, torch.bfloat16, 64, 64, ELU, True, True, 32), 8),
}


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, tmp_path):
    """The CPU stands for a GPU, with a disk of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_wanted", lambda device: True)
    monkeypatch.setattr(self_check, "_capturing", lambda: False)
    monkeypatch.setattr(self_check, "machine", lambda *_: {"gpu": "a GPU"})
    forget(monkeypatch)
    yield
    self_check._verdicts.cache_clear()


def forget(monkeypatch):
    """What a new process knows."""
    monkeypatch.setattr(self_check, "_reasons", {})
    self_check._verdicts.cache_clear()


def never(device):
    raise AssertionError("the verdict is on disk")


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_wrong_kernel_is_found_out(monkeypatch, check):
    off = {"y": 1e-3, "weight": 0.3, "bias": float("nan")}
    with pytest.warns(UserWarning, match="will not be used here; plain PyTorch is used instead"):
        reason = replace(check, compare=lambda device: off).refusal(CPU)
    assert reason.startswith(check.kernels)
    assert "wrong on this machine: off weight by 3e-01, bias by nan" in reason
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="will not be used here"):
        assert replace(check, compare=never).refusal(CPU) == reason
    forget(monkeypatch)
    monkeypatch.setattr(self_check, "_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the call once before"):
        replace(check, key="another").refusal(CPU)


def test_a_share_that_is_dropped_has_a_limit_of_its_own():
    check = CHECKS["feedforward"]
    assert check.reason(self_check.Verdict({"y": 1.9e-2, "dropped": 5e-3})) is None
    assert "off dropped by 7e-03 (limit 6e-03)" in check.reason(self_check.Verdict({"y": 1e-3, "dropped": 7e-3}))


def test_where_kernels_are_wrong_plain_pytorch_computes(monkeypatch):
    monkeypatch.setattr(device, "refuses", lambda *_: None)
    for module in (adaptive, feedforward, smoothing, linear):
        monkeypatch.setattr(module, "compare", lambda *_: {"y": 1.0})
    targets = torch.tensor([0, 5, 9])
    logits = torch.randn(3, 10)
    with pytest.warns(UserWarning, match="label smoothing for torch.float32 are wrong on this machine"):
        torch.testing.assert_close(smoothed_nll(logits, targets, 0.1), dense_nll(logits, targets, 0.1))
    q = torch.randn(1, 3, 2, 4)
    with pytest.warns(UserWarning, match="linear attention for float32, d = 4 through elu, M = 4, by weights"):
        torch.testing.assert_close(
            fw.linear_attention(q, q, q, features=ELU), linear.weighted(q, q, q, None, ELU, True)
        )
    adaptive_softmax, feed_forward = AdaptiveSoftmax(10, 4, backend="fused"), FeedForward(4, 8, backend="fused")
    with (
        pytest.warns(UserWarning, match="softmax kernels"),
        pytest.raises(ValueError, match=r"'fused', but the softmax kernels for torch.float32, d = 4 are wrong"),
    ):
        adaptive_softmax(torch.randn(3, 4), targets)
    with (
        pytest.warns(UserWarning, match="feed-forward kernels"),
        pytest.raises(ValueError, match=r"'fused', but the feed-forward kernels for d_model = 4 are wrong"),
    ):
        feed_forward(torch.randn(3, 4))
