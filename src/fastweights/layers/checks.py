"""What every layer asks of its arguments."""

import torch
from torch import Tensor, nn

from fastweights.ops.memory import check_marks

_CASTS = {torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}


def head_size(d_model: int, n_heads: int, d_head: int | None) -> int:
    """Return d_head, or d_model / n_heads if None."""
    if min(d_model, n_heads, 1 if d_head is None else d_head) < 1:
        raise ValueError(f"d_model, n_heads and d_head must be at least 1, got {d_model}, {n_heads} and {d_head}")
    if d_head is None and d_model % n_heads:
        raise ValueError(f"d_model = {d_model} does not divide into {n_heads} heads; give d_head or other numbers")
    return d_model // n_heads if d_head is None else d_head


def check_dropout(dropout: float) -> float:
    """Return `dropout` if it is a share."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    return dropout


def check_input(x: Tensor, d_model: int, mask: Tensor | None) -> Tensor:
    """Check x and `mask`, and return x with zeros at padding."""
    if x.dim() != 3 or x.shape[-1] != d_model or 0 in x.shape:
        hint = "; one token goes through step" if x.dim() == 2 else ""
        raise ValueError(f"x must have shape (B, T, d_model = {d_model}), got {tuple(x.shape)}{hint}")
    check_marks("mask", mask, x, "True for tokens that count")
    if mask is None:
        return x
    check_device("mask", mask, x)
    return x.masked_fill(~mask.unsqueeze(-1), 0)


def check_token(x: Tensor, d_model: int) -> Tensor:
    """Return one token per row as a segment of length 1."""
    if x.dim() != 2 or x.shape[-1] != d_model:
        hint = "; a segment goes through forward" if x.dim() == 3 else ""
        raise ValueError(f"x must have shape (B, d_model = {d_model}), got {tuple(x.shape)}{hint}")
    return x.unsqueeze(1)


def check_dtype(x: Tensor, linear: nn.Module, name: str = "x") -> None:
    """Refuse numbers that the layer's first projection cannot be multiplied with; autocast casts them itself."""
    weight = getattr(linear, "weight", None)
    # A projection that was replaced, by a quantised one for instance, knows itself what it takes.
    if not isinstance(weight, Tensor) or x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type):
        return
    remedy = f"use {name}.{_CASTS.get(weight.dtype, f'to({weight.dtype})')}()"
    if x.dtype in _CASTS:
        remedy += f" or layer.{_CASTS[x.dtype]}()"
    raise TypeError(f"{name} has dtype {x.dtype} but the layer's weights are {weight.dtype}; {remedy}")


def check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    """Refuse a tensor that is not where x is."""
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device} but x on {x.device}; move it with .to({str(x.device)!r})")
