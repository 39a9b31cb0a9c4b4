"""What a memory answers for a key, and what a layer hands to its memory."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.ops.normalization import safe_divide
from fastweights.ops.spec import Inputs
from fastweights.ops.state import FastWeightState


class Recall(NamedTuple):
    """What a memory answers for keys.

    Attributes:
        value: what is read, (B, S, H, M).
        cosine: the cosine between it and the value that was expected, (B, S, H); None where none was given.
        error: the norm of their difference over the norm of the expected value, (B, S, H); None likewise.
    """

    value: Tensor
    cosine: Tensor | None = None
    error: Tensor | None = None


def recall(state: FastWeightState, keys: Tensor, values: Tensor | None = None) -> Recall:
    """Read the memory with keys (B, S, H, D), and compare what it answers with values (B, S, H, M).

    A state with an accumulator z, from attention normalisation, is read as the memory itself reads it: W k / (z·k).
    """
    check_rows(state, keys, values)
    keys = keys.to(state.W.dtype)
    value = torch.einsum("bshd,bhdm->bshm", keys, state.W)
    if state.z is not None:
        value = safe_divide(value, torch.einsum("bshd,bhd->bsh", keys, state.z).unsqueeze(-1))
    if values is None:
        return Recall(value)
    values = values.to(value.dtype)
    return Recall(value, cosine(value, values), relative_error(value, values))


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Compute the cosine of the angle between vectors of the last axis; 0 where one of them is 0."""
    return safe_divide((x * y).sum(-1), x.norm(dim=-1) * y.norm(dim=-1))


def relative_error(value: Tensor, expected: Tensor) -> Tensor:
    """Compute |value - expected| / |expected| over the last axis; where nothing was expected, |value|."""
    size = expected.norm(dim=-1)
    return (value - expected).norm(dim=-1) / torch.where(size > 0, size, 1)


def check_rows(state: FastWeightState, keys: Tensor, values: Tensor | None) -> None:
    """Refuse keys and values that do not fit a state or each other."""
    if not isinstance(state, FastWeightState):
        raise TypeError(f"state must be a FastWeightState, got {type(state).__name__}")
    B, H, D, M = state.W.shape
    for name, x, axis, size in (("keys", keys, "D", D), ("values", values, "M", M)):
        if x is not None and (x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (B, H, size)):
            raise ValueError(
                f"{name} must have shape (B, S, H, {axis}) = ({B}, S, {H}, {size}) for a state with W of shape "
                f"{tuple(state.W.shape)}, got {tuple(x.shape)}"
            )
    if values is not None and values.shape[1] != keys.shape[1]:
        raise ValueError(f"there must be one value for each key, got {values.shape[1]} for {keys.shape[1]} keys")


def inputs_of(layer: FastWeightAttention, x: Tensor, state: FastWeightState | None = None) -> dict[str, Any]:
    """Return what a layer hands to its memory for x (B, T, d_model): the arguments of `fast_weight_memory`.

    Keys and queries have gone through convolution, feature map and normalisation, and gates are numbers between 0 and
    1 (or logarithms of decays), so that `attribute(**inputs_of(layer, x))` and the other probes take them as they are.
    Random features stay as they are.
    """
    if not isinstance(layer, FastWeightAttention):
        raise TypeError(f"layer must be a FastWeightAttention, got {type(layer).__name__}, which has no fast weights")
    heads, _, _ = layer.memory_inputs(x, state)
    normalization, features = heads.pop("normalization"), heads.pop("features")
    q, k, v, rule = (heads.pop(name) for name in ("q", "k", "v", "rule"))
    del heads["backend"]
    raw = Inputs(rule, q, k, v, heads, features=features, attention=normalization is not None)
    mapped = raw.mapped()
    call = {"q": mapped.q, "k": mapped.k, "v": mapped.v, "rule": rule, "normalization": normalization, **mapped.gates}
    # A convolution's last inputs belong to the layer, not to its memory.
    return call if state is None else {**call, "state": FastWeightState(state.W, state.z)}
