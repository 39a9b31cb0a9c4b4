"""Normalisations of Sec. 4.2 that act on keys and queries, and the division that cannot make NaN."""

import torch
from torch import Tensor


def divides(normalization: str | None) -> bool:
    """Return whether reads are divided as in attention, Eqs. 19 and 28; refuse what is neither "attention" nor None."""
    if normalization not in (None, "attention"):
        raise ValueError(f"normalization must be 'attention' or None, got {normalization!r}")
    return normalization is not None


def safe_divide(x: Tensor, by: Tensor) -> Tensor:
    """Compute x / by, and 0 where |by| is below the square root of the smallest normal number.

    That far down the quotient has no digits left and its gradient, which grows as 1 / by, would overflow; 0 is what an
    empty memory returns (the paper's v_bar of the first step).
    """
    empty = by.abs() < torch.finfo(by.dtype).tiny ** 0.5
    return (x / by.masked_fill(empty, 1)).masked_fill(empty, 0)


def sum_normalize(x: Tensor) -> Tensor:
    """Divide features by their sum over the last axis, Eq. 29; zeros where the sum is 0.

    Balances what the delta rule writes and removes (App. A.2). Equivalent to `x / x.sum(-1, keepdim=True)`, with the
    sum taken in float32 for 16-bit inputs.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return safe_divide(wide, wide.sum(-1, keepdim=True)).to(x.dtype)


# Under the root, as in the models that are trained with L2 normalisation.
L2_EPS = 1e-6


def l2_normalize(x: Tensor, eps: float = 0.0) -> Tensor:
    """Divide features by their Euclidean norm over the last axis, sqrt(|x|² + eps); zeros where it is 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if eps:
        return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    largest = wide.detach().abs().amax(-1, keepdim=True)
    scaled = safe_divide(wide, largest)
    # Scaled by the largest entry the squares neither overflow nor underflow; an all-zero row has norm 1 to stay put.
    squared = scaled.square().sum(-1, keepdim=True)
    return (scaled / torch.where(squared > 0, squared, 1).sqrt()).to(x.dtype)


def smooth_l2_normalize(x: Tensor) -> Tensor:
    """Compute `l2_normalize(x, L2_EPS)`: length 1, but for features next to 0, which stay there."""
    return l2_normalize(x, L2_EPS)
