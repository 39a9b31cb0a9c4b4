"""The feed-forward layer with its wide middle written once: relu and dropout where the product is made.

What dropout drew need not be kept: an entry that is 0 afterwards has no gradient, whichever of the two made it so.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.gpu.device import interpreted, unavailable

LARGEST_D = 256
LIMIT = 2e-2
# Six standard deviations of the share that is dropped.
DROPPED_LIMIT = 6e-3
# Tokens in a tile, wide entries in a step, steps in a program, warps and stages, by the largest d_model.
TILES = {128: (128, 64, 4, 4, 2), 256: (64, 64, 4, 4, 2)}


def refuses(x: Tensor, d_ff: int, p: float) -> str | None:
    """Why the kernels are not for this input with that share dropped."""
    if reason := unavailable():
        return reason
    if x.shape[-1] > LARGEST_D:
        return f"d_model may be up to {LARGEST_D}, got {x.shape[-1]}"
    if x.numel() // x.shape[-1] * d_ff >= 2**31:
        return f"{x.numel() // x.shape[-1]} tokens times d_ff = {d_ff} are more than can be numbered"
    if interpreted():
        right = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        return None if right else f"Triton's interpreter takes float32 and float64 on the CPU, not {x.dtype}"
    if x.device.type != "cuda":
        return f"the kernels run on CUDA devices, the tensors are on {x.device}"
    if x.dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16, not in {x.dtype}"
    # Tracing has no numbers to check with; the custom op checks when it first runs.
    return None if torch.compiler.is_compiling() else distrust(x, d_ff, p)


def distrust(x: Tensor, d_ff: int, p: float) -> str | None:
    """What the self-check found wrong with the kernels for this input."""
    return _verdict(x.shape[-1], d_ff, p, x.device) if x.is_cuda else None


@cache
def _verdict(d_model: int, d_ff: int, p: float, device: torch.device) -> str | None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the feed-forward kernels have not been checked on this GPU, and a CUDA graph is being captured: "
            "run the call once before"
        )
    errors = compare(torch.bfloat16, d_model, d_ff, device, 300, p)
    limits = dict.fromkeys(errors, LIMIT) | {"dropped": DROPPED_LIMIT}
    if wrong := {name: error for name, error in errors.items() if not error <= limits[name]}:
        off = ", ".join(f"{name} by {error:.0e}" for name, error in wrong.items())
        reason = f"the feed-forward kernels for d_model = {d_model} are wrong on this machine: off {off}"
        warnings.warn(f"{reason}. They will not be used here, plain PyTorch is; please report this.", stacklevel=2)
        return reason
    return None


def compare(
    dtype: torch.dtype, d_model: int, d_ff: int, device: torch.device, tokens: int, p: float = 0.1
) -> dict[str, float]:
    """How far output and gradients are from float64 with the same entries dropped, relative to their norms.

    "dropped" is how far their share is from p, in thousands of standard deviations.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        shapes = [(tokens, d_model), (d_ff, d_model), (d_ff,), (d_model, d_ff)]
        inputs = [torch.randn(shape, device=device) for shape in shapes]
        dy, seed = torch.randn(tokens, d_model, device=device), new_seed(device)
    inputs[1], inputs[3] = inputs[1] * d_model**-0.5, inputs[3] * d_ff**-0.5
    x, w1, b1, w2 = (x if x.dim() == 1 else x.to(dtype) for x in inputs)
    dy = dy.to(dtype)
    exact = [x.double() for x in (x, w1, b1, w2)]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for tensor in (x, w1, b1, w2, *exact):
            tensor.requires_grad_()
        y, wide = fused_feedforward(x, w1, b1, w2, seed, p, True)
        h = torch.addmm(exact[2], exact[0], exact[1].mT).relu()
        # The smallest may round to 0 in 16 bits, which drops nothing that counts.
        expected = (h * (wide != 0) / (1 - p)) @ exact[3].mT
        ours = [y, *torch.autograd.grad(y, (x, w1, b1, w2), dy)]
        theirs = [expected, *torch.autograd.grad(expected, exact, dy.double())]
    names = ("y", "x", "w1", "b1", "w2")
    pairs = zip(names, ours, theirs, strict=True)
    errors = {name: (a.double() - b).detach().norm().div(b.detach().norm()).item() for name, a, b in pairs}
    alive = h.detach() > 0
    share = (wide.detach()[alive] == 0).double().mean().item()
    errors["dropped"] = 1e-3 * abs(share - p) / max((p * (1 - p) / max(1, int(alive.sum()))) ** 0.5, 1e-30)
    return errors


def new_seed(device: torch.device) -> Tensor:
    """Two random numbers, drawn on the device, by which `fused_feedforward` drops."""
    return torch.randint(2**31 - 1, (2,), device=device)


def _device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _constants(x: Tensor, p: float) -> dict[str, Any]:
    d = x.shape[1]
    tile, step, span, warps, stages = next(sizes for largest, sizes in TILES.items() if largest >= d)
    sizes = {"TILE": tile, "STEP": step, "SPAN": span, "BLOCK_K": max(16, 1 << (d - 1).bit_length())}
    return {**sizes, "SCALE": 1 / (1 - p), "num_warps": warps, "num_stages": stages}


@torch.library.custom_op("fastweights::feedforward", mutates_args=())
def fused_feedforward(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, seed: Tensor, p: float, trusted: bool
) -> tuple[Tensor, Tensor]:
    """dropout(relu(x W_1^T + b_1)) W_2^T (n, d_model) and its middle (n, d_ff); W_1 and W_2 in the dtype of x.

    Without `trusted` the kernels must have passed their self-check.
    """
    if not trusted and (reason := distrust(x, len(w1), p)):
        raise RuntimeError(f"{reason}; compile again with FeedForward.backend = 'dense'")
    import triton.language as tl

    from fastweights.layers.feedforward_kernels import widen

    x, w1 = x.contiguous(), w1.contiguous()
    (n, K), F = x.shape, len(w1)
    wide = x.new_empty(n, F)
    constants = _constants(x, p)
    grid = -(-n // constants["TILE"]) * -(-F // (constants["STEP"] * constants["SPAN"]))
    more = {
        "THRESHOLD": min(round(p * 2**32), 2**32 - 1),
        "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32,
    }
    with _device(x):
        widen[(grid,)](x, w1, b1, seed, wide, n, K, F, **constants, **more)
    return wide @ w2.mT, wide


@torch.library.custom_op("fastweights::feedforward_backward", mutates_args=())
def fused_feedforward_backward(
    dy: Tensor, x: Tensor, w1: Tensor, w2: Tensor, wide: Tensor, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, W_1, b_1 (at least float32) and W_2."""
    from fastweights.layers.feedforward_kernels import widen_gradient

    dy, x, w2 = dy.contiguous(), x.contiguous(), w2.contiguous()
    (n, K), F = dy.shape, wide.shape[1]
    constants = _constants(x, p)
    tiles = -(-n // constants["TILE"])
    d_wide = torch.empty_like(wide)
    d_bias = x.new_empty(tiles, F, dtype=torch.promote_types(x.dtype, torch.float32))
    grid = tiles * -(-F // (constants["STEP"] * constants["SPAN"]))
    with _device(x):
        widen_gradient[(grid,)](dy, w2, wide, d_wide, d_bias, n, K, F, **constants)
    return d_wide @ w1, d_wide.mT @ x, d_bias.sum(0), dy.mT @ wide


@fused_feedforward.register_fake
def _(x, w1, b1, w2, seed, p, trusted):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape[0], w1.shape[0])


@fused_feedforward_backward.register_fake
def _(dy, x, w1, w2, wide, p):  # type: ignore[no-untyped-def]
    bias = x.new_empty(w1.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape), w1.new_empty(w1.shape), bias, w2.new_empty(w2.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, w1, b1, w2, _, ctx.p, _ = inputs
    ctx.dtype = b1.dtype
    ctx.save_for_backward(x, w1, w2, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, _):  # type: ignore[no-untyped-def]
    if dy is None:
        return (None,) * 7
    dx, d_w1, d_b1, d_w2 = fused_feedforward_backward(dy, *ctx.saved_tensors, ctx.p)
    return dx, d_w1, d_b1.to(ctx.dtype), d_w2, None, None, None


fused_feedforward.register_autograd(_backward, setup_context=_setup_context)
