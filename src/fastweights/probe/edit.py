"""Change one association of a memory in closed form, and leave the others alone."""

from dataclasses import replace

import torch
from torch import Tensor

from fastweights.ops.state import FastWeightState
from fastweights.probe.reading import check_rows, recall


def overwrite(state: FastWeightState, keys: Tensor, values: Tensor) -> FastWeightState:
    """Return the state that answers keys (B, S, H, D) with values (B, S, H, M), whatever rule wrote it.

    It is the smallest such change of W: for one key W + k (v - k W)^T / (k·k), key-major. A read with a query that is
    orthogonal to all keys is what it was, to the last bit where the entries of query and keys do not overlap.

    Under attention normalisation reads are k W / (z·k). z stays as it is, but where z·k is 0, which means that nothing
    was ever written there: z then gets the key, as a write would give it.

    Raises:
        ValueError: a key is 0, or keys of one head depend on each other linearly, so that no state may answer all.
    """
    check_rows(state, keys, values)
    dtype = state.W.dtype
    k, target = keys.to(dtype).transpose(1, 2), values.to(dtype).transpose(1, 2)
    gram = k @ k.mT
    _check_independent(gram, dtype)
    z = state.z
    if z is not None:
        total = (k * z.unsqueeze(2)).sum(-1, keepdim=True)
        # As `safe_divide` has it: there reads are 0, whatever W holds.
        empty = total.abs() < torch.finfo(dtype).tiny ** 0.5
        missing = torch.where(empty, gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), 0)
        z = z + (k.mT @ torch.linalg.solve(gram, missing)).squeeze(-1)
        target = target * (k * z.unsqueeze(2)).sum(-1, keepdim=True)
    change = torch.linalg.solve(gram, target - k @ state.W)
    return replace(state, W=state.W + k.mT @ change, z=z)


def forget(state: FastWeightState, keys: Tensor) -> FastWeightState:
    """Return the state that answers keys (B, S, H, D) with 0, and all that is orthogonal to them as before.

    It is `overwrite` with values of 0: for one key W - k (k W)^T / (k·k).
    """
    answer = recall(state, keys).value
    return overwrite(state, keys, torch.zeros_like(answer))


def _check_independent(gram: Tensor, dtype: torch.dtype) -> None:
    """Refuse keys that are 0 or depend on each other linearly."""
    squares = gram.diagonal(dim1=-2, dim2=-1)
    if not bool((squares > 0).all()):
        zero = (squares <= 0).nonzero()[0].tolist()
        raise ValueError(
            f"batch {zero[0]}, head {zero[1]}, key {zero[2]} is 0, and nothing is stored under it; leave it out"
        )
    lengths = squares.sqrt()
    cosines = gram / (lengths.unsqueeze(-1) * lengths.unsqueeze(-2))
    smallest = torch.linalg.eigvalsh(cosines)[..., 0]
    least = gram.shape[-1] * torch.finfo(dtype).eps
    if bool((smallest <= least).any()):
        b, h = (smallest <= least).nonzero()[0].tolist()
        raise ValueError(
            f"the {gram.shape[-1]} keys of batch {b}, head {h} depend on each other linearly, so that no memory can "
            "answer all of them; edit fewer at once"
        )
