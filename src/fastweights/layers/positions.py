"""Absolute positions: none at all, or the sinusoids of the paper's Transformers."""

import torch
from torch import Tensor

POSITIONS = ("none", "sinusoid")
DIRECTIONS = ("backward", "forward")


def sinusoid(positions: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Embed positions (...) as (..., dim): sin(n 10000^(-2i/dim)) for each i < dim / 2, then the cosines."""
    # In 16 bits, distances above 256 would fall together.
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = 10000 ** (-torch.arange(0, dim, 2, dtype=wide, device=positions.device) / dim)
    angles = positions.to(wide).unsqueeze(-1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1).to(dtype)


def encode_positions(x: Tensor, direction: str = "backward", start: Tensor | None = None) -> Tensor:
    """Return what to add to x (B, T, d_model) so that tokens know their place: (T, d_model) or (B, T, d_model).

    Equivalent to

        n = range(T - 1, -1, -1) if direction == "backward" else start[:, None] + range(T)
        sinusoid(n, d_model)

    "backward" is what the authors' code does: the last token of a window always has position 0 and every token knows
    its distance to the end, whatever the length. It has no meaning for a window that is continued. "forward" counts
    from the first token; `start` (B,) says how many tokens came before x in each row, so that a text may come in parts.
    """
    T, d_model = x.shape[1:]
    if direction == "forward":
        positions = torch.arange(T, device=x.device)
        return sinusoid(positions if start is None else start.unsqueeze(1) + positions, d_model, x.dtype)
    if start is not None:
        raise ValueError("positions that run backward have no start; count them forward to go on from earlier tokens")
    return sinusoid(torch.arange(T - 1, -1, -1, device=x.device), d_model, x.dtype)
