"""Strides as the kernels take them."""

from __future__ import annotations

from torch import Tensor

Gates = tuple[Tensor | None, Tensor | None, Tensor | None]


# Kernels that step from chunk to chunk reach over fewer tokens than this from where they stand.
REACH = 128


def even(gates: Gates, axis: int = 1, reach: int = REACH) -> tuple[Gates, tuple[int, int]]:
    """The gates with strides that they all have, and those strides, of `axis` (tokens, or 0 for batches) and heads."""
    there = [gate for gate in gates if gate is not None]
    if not there:
        return gates, (1, 1)
    strides = there[0].stride()
    if any(gate.stride() != strides for gate in there) or (axis == 1 and not _in_line(there[0], reach)):
        a, e, w = (None if gate is None else gate.contiguous() for gate in gates)
        H, T = there[0].shape[2], there[0].shape[1]
        return (a, e, w), (H if axis == 1 else H * T, 1)
    return gates, (_token_stride(there[0]) if axis == 1 else strides[0], strides[2])


def _in_line(x: Tensor, reach: int) -> bool:
    """Whether tokens (B, T, H, ...) follow each other from batch to batch; `reach` of them and all heads in 32 bits."""
    batch, token, head = x.stride(0), _token_stride(x), x.stride(2)
    follow = x.shape[0] == 1 or batch == x.shape[1] * token
    return follow and token >= 0 and token * reach < 2**31 and head >= 0 and head * x.shape[2] < 2**31


def _token_stride(x: Tensor) -> int:
    """From a token (B, T, H, ...) to the next, which is in the next batch where each has one: torch lets a dimension of
    size 1 have any stride."""
    return x.stride(0 if x.shape[1] == 1 else 1)


def addressable(x: Tensor, reach: int = REACH) -> Tensor:
    """x (B, T, H, ·) with adjacent features, batches that follow each other in time, and `reach` tokens in 32 bits."""
    return x if x.stride(3) == 1 and _in_line(x, reach) else x.contiguous()


def ready(
    reach: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, e: Tensor | None, w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The inputs with strides that the kernels can take."""
    gates = even((a, e, w), reach=reach)[0]
    return addressable(q, reach), addressable(k, reach), addressable(v, reach), *gates


# Strides that are multiples of so many entries are passed as such multiples; Triton itself only looks for 16.
_UNIT = 8


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """Of each of the tensors (B, T, H, ·), from token to token and from head to head."""
    return tuple(stride for x in tensors for stride in (_token_stride(x), x.stride(2)))


def in_units(steps: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The unit, and how many of it the strides are."""
    if any(stride % _UNIT for stride in steps):
        return 1, steps
    return _UNIT, tuple(stride // _UNIT for stride in steps)
