"""What the baselines share: states with one entry per past token, and who may see whom."""

from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastweights.layers.checks import check_device
from fastweights.ops.state import State


@dataclass(eq=False)
class PaddedState(State):
    """A state with one entry per past token; `mask` (B, S) is False where that token was padding, None if none was."""

    mask: Tensor | None = field(default=None, kw_only=True)


def visible(T: int, S: int, mask: Tensor | None, causal: bool, device: torch.device) -> Tensor:
    """Return which of S tokens the last T of them see, bool: (T, S), or (B, 1, T, S) under a `mask` (B, S)."""
    i, j = torch.arange(S - T, S, device=device).unsqueeze(1), torch.arange(S, device=device)
    seen = j <= i if causal else torch.ones(T, S, dtype=torch.bool, device=device)
    # Padding sees itself, since its output is dropped anyway and a softmax over nothing is NaN in some SDPA kernels.
    return seen if mask is None else (seen & mask[:, None, None]) | (i == j)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, is_causal: bool = False
) -> Tensor:
    """Compute softmax attention of q (B, T, H, ·) over k and v (B, S, H, ·), (B, T, H, ·)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, mask, dropout, is_causal).transpose(1, 2)


def join_masks(past: Tensor | None, n_past: int, mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the mask of n_past earlier tokens and those of x together; None if nothing was padding."""
    if past is None and mask is None:
        return None
    past = x.new_ones(x.shape[0], n_past, dtype=torch.bool) if past is None else past
    mask = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    return torch.cat([past, mask], 1)


Past = TypeVar("Past", bound=PaddedState)


def check_state(state: object, kind: type[Past], entries: dict[str, tuple[int, ...]], like: Tensor) -> Past:
    """Return `state` if it is of this kind, with tensors (B, S, *entry) that go with `like` (B, ...) of this call."""
    if not isinstance(state, kind):
        raise TypeError(
            f"state must be a {kind.__name__} or None, got {type(state).__name__}; it comes from another kind of layer"
        )
    B = like.shape[0]
    for name, entry in entries.items():
        tensor: Tensor = getattr(state, name)
        if tensor.shape[:1] + tensor.shape[2:] != (B, *entry):
            wanted = ", ".join(map(str, (B, "S", *entry)))
            raise ValueError(f"state.{name} must have shape ({wanted}) here, got {tuple(tensor.shape)}")
        if tensor.dtype != like.dtype:
            raise TypeError(
                f"state.{name} is {tensor.dtype}, but this call computes in {like.dtype}; use state.to({like.dtype})"
            )
        check_device(f"state.{name}", tensor, like)
        if state.mask is not None and state.mask.shape != tensor.shape[:2]:
            raise ValueError(
                f"state.mask must have shape {tuple(tensor.shape[:2])} beside state.{name} of {tuple(tensor.shape)}, "
                f"got {tuple(state.mask.shape)}"
            )
    return state
