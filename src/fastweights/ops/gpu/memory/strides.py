"""Strides as the kernels take them."""

from __future__ import annotations

from torch import Tensor

from fastweights.ops.causality import Tokens

Gates = tuple[Tensor | None, Tensor | None, Tensor | None]

# Kernels that step from chunk to chunk reach over fewer tokens than this from where they stand.
REACH = 128
# Strides that are multiples of this are passed as such multiples; Triton itself only looks for 16.
_UNIT = 8


class Strides:
    """How the tokens of a call lie in memory: which of them have to be copied first, and the strides of all."""

    def __init__(self, tokens: Tokens, reach: int) -> None:
        """`reach`: tokens that a kernel counts entries over in 32 bits."""
        self.reach = reach
        ready = q, k, v, a, e, w = addressable_tokens(tokens, reach)
        self.as_given = all(x is y for x, y in zip(ready, tokens, strict=True))
        self._strides = strides_of(q, k, v)
        self.gates = common_strides((None if per_key(a) else a, e, w), reach=reach)[1]

    def prepare(self, tokens: Tokens) -> Tokens:
        """Return tokens that lie like those of the plan with strides that the kernels can take."""
        return tokens if self.as_given else addressable_tokens(tokens, self.reach)

    def in_units(self, dy: Tensor | None = None) -> tuple[int, tuple[int, ...]]:
        """Return the unit, and the token and head strides of q, k, v and dy in it, then those of the gates."""
        strides = self._strides if dy is None else (*self._strides, *strides_of(dy))
        if any(stride % _UNIT for stride in strides):
            return 1, (*strides, *self.gates)
        return _UNIT, (*(stride // _UNIT for stride in strides), *self.gates)


def per_key(a: Tensor | None) -> bool:
    """Say whether decays are one per key channel."""
    return a is not None and a.dim() == 4


def common_strides(gates: Gates, axis: int = 1, reach: int = REACH) -> tuple[Gates, tuple[int, int]]:
    """Return the gates with strides in common, and those strides, of `axis` (tokens, or 0 for batches) and heads."""
    present = [gate for gate in gates if gate is not None]
    if not present:
        return gates, (1, 1)
    first = present[0]
    strides = first.stride()
    if any(gate.stride() != strides for gate in present) or (axis == 1 and not _in_line(first, reach)):
        a, e, w = (None if gate is None else gate.contiguous() for gate in gates)
        H, T = first.shape[2], first.shape[1]
        return (a, e, w), (H if axis == 1 else H * T, 1)
    return gates, (_token_stride(first) if axis == 1 else strides[0], strides[2])


def _in_line(x: Tensor, reach: int) -> bool:
    """Say whether tokens (B, T, H, ...) follow each other across batches, `reach` of them and all heads in 32 bits."""
    batch, token, head = x.stride(0), _token_stride(x), x.stride(2)
    follow = x.shape[0] == 1 or batch == x.shape[1] * token
    return follow and token >= 0 and token * reach < 2**31 and head >= 0 and head * x.shape[2] < 2**31


def _token_stride(x: Tensor) -> int:
    """Return the stride from a token (B, T, H, ...) to the next, which is in the next batch where each has one.

    Torch lets a dimension of size 1 have any stride.
    """
    return x.stride(0 if x.shape[1] == 1 else 1)


def addressable(x: Tensor, reach: int = REACH) -> Tensor:
    """Return x (B, T, H, ·) with adjacent features, batches one after the other, and `reach` tokens in 32 bits."""
    return x if x.stride(3) == 1 and _in_line(x, reach) else x.contiguous()


def addressable_tokens(tokens: Tokens, reach: int = REACH) -> Tokens:
    """Return the tokens with strides that the kernels can take."""
    q, k, v, a, e, w = tokens
    if per_key(a):
        assert a is not None
        # Decays per key channel lie as if they were all there is.
        _, e, w = common_strides((None, e, w), reach=reach)[0]
        gates: Gates = (a.contiguous(), e, w)
    else:
        gates = common_strides((a, e, w), reach=reach)[0]
    return addressable(q, reach), addressable(k, reach), addressable(v, reach), *gates


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """Return the token and head strides of each of the tensors (B, T, H, ·)."""
    return tuple(stride for x in tensors for stride in (_token_stride(x), x.stride(2)))
