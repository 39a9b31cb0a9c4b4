"""Launches the kernels of linear attention; how, is decided here by shapes. Triton is imported when they first run.

B sequences of T queries and S keys, H heads of R entries before the map and D after it, values of M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.ops.features import Features
from fastweights.ops.gpu.device import use_device_of
from fastweights.ops.gpu.memory.strides import addressable, strides_of

# q, k, v, a mask of the keys or None, and the vectors (m, R) of FAVOR+ or None.
Inputs = Sequence[Any]

# Ways to compute a call: all weights of a head at once; a head's memory, written and read in one launch; one launch for
# each step, with memories as sums of parts; a state that the caller keeps, written by one call and read by others.
WEIGHTS, ONE_LAUNCH, PARTS, KEPT = "weights", "one launch", "parts", "a state"
# Up to this many tokens, or with this many heads of all sequences together, a program does everything for a head.
SHORT, MANY_HEADS = 512, 128
# Programs that write parts of memories, and the fewest tiles of tokens of a part.
PROGRAMS, LEAST_TILES = 512, 4
# Queries that read a state at once: those of a few beams.
QUERIES = 16


class Call(NamedTuple):
    """What decides which kernels run, and how. On a GPU one call of a kind is checked before others are made."""

    way: str
    dtype: torch.dtype
    R: int
    M: int
    features: Features
    normalized: bool
    masked: bool
    C: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, features: Features, normalized: bool) -> Call:
        """Describe a call."""
        R, M, longest = q.shape[3], v.shape[3], max(q.shape[1], k.shape[1])
        way, width = way_of(q, k, v, features), tile_width(q.dtype, features.size(R), M)
        C = power_of_two(longest) if way == WEIGHTS else width
        return cls(way, q.dtype, R, M, features, normalized, mask is not None, C)

    @classmethod
    def of_state(
        cls, x: Tensor, M: int, mask: Tensor | None, features: Features, normalized: bool, reads: bool = False
    ) -> Call:
        """Describe a call that writes a state with keys x, or reads one with queries x."""
        R = x.shape[3]
        C = QUERIES if reads else tile_width(x.dtype, features.size(R), M)
        return cls(KEPT, x.dtype, R, M, features, normalized, mask is not None, C)


class Products(NamedTuple):
    """How products are formed: from operands of which dtype, as Triton and torch name it, and how precisely."""

    operand: str
    kept: torch.dtype
    precision: str


# float16 has not the range of a memory: as in the memory's kernels.
PRODUCTS = {
    torch.bfloat16: Products("bfloat16", torch.bfloat16, "ieee"),
    torch.float16: Products("float32", torch.float32, "tf32"),
    torch.float32: Products("float32", torch.float32, "tf32x3"),
    # The interpreter only.
    torch.float64: Products("float64", torch.float64, "ieee"),
}
# Maps of which a feature may depend on any entry of a head.
WHOLE = ("dpfp", "favor")
# Warps of a program by the tokens of its tiles, and how far its loads run ahead, less one.
WARPS, STAGES = {16: 2, 32: 4, 64: 4}, 2


def power_of_two(n: int) -> int:
    """Return the least power of two that holds n and fills a matrix product."""
    return max(16, 1 << (n - 1).bit_length())


def tile_width(dtype: torch.dtype, D: int, M: int) -> int:
    """Return the most tokens, and the features, that tiles have.

    Hopper's products of four warps take 64 rows; beside those nothing may be narrower (see memory/variants.py).
    """
    return 64 if dtype == torch.bfloat16 and max(D, M) > 32 else 32


@cache
def options(call: Call, H: int, **changes: Any) -> Any:
    """Return what the kernels of such a call are compiled for."""
    import triton.language as tl

    from fastweights.ops.gpu.linear_attention.heads import Options

    D, products = call.features.size(call.R), PRODUCTS[call.dtype]
    width, whole, m = tile_width(call.dtype, D, call.M), call.features.map in WHOLE, call.features.m
    known = {
        "C": call.C,
        "block_D": width,
        "block_M": max(width, power_of_two(call.M)),
        "block_R": power_of_two(call.R) if whole else width,
        "whole": whole,
        "operand": getattr(tl, products.operand),
        "acc": tl.float64 if call.dtype == torch.float64 else tl.float32,
        "precision": products.precision,
        # Blocks of features are of entries that lie side by side; selecting them by products takes registers.
        "gather": True,
        # Few warps transpose by shuffles.
        "both_ways": WARPS[call.C] < 4,
    }
    kind = {"map": call.features.map, "normalized": call.normalized, "masked": call.masked}
    if m:
        kind |= {"vectors": m, "half_square": call.features.inner**2 / 2, "level": math.log(2 * m) / 2}
    return Options(H=H, R=call.R, D=D, M=call.M, **{**kind, **known, **changes})


def way_of(q: Tensor, k: Tensor, v: Tensor, features: Features) -> str:
    """Return the way to compute a call."""
    longest = max(q.shape[1], k.shape[1])
    if longest <= tile_width(q.dtype, features.size(q.shape[3]), v.shape[3]):
        return WEIGHTS
    if q.dtype == torch.float16:
        # One memory for all keys, rounded to TF32, loses gradients of queries where values have a mean.
        return PARTS
    return ONE_LAUNCH if longest <= SHORT or q.shape[0] * q.shape[2] >= MANY_HEADS else PARTS


def parts_of(heads: int, blocks: int, tokens: int, C: int) -> tuple[int, int]:
    """Return how many parts the memories of this many heads are sums of, and the tokens of one, a multiple of C."""
    tiles = -(-tokens // C)
    wanted = max(1, min(PROGRAMS // max(1, heads * blocks), tiles // LEAST_TILES))
    each = -(-tiles // wanted)
    return -(-tiles // each), each * C


class Kept(NamedTuple):
    """What the forward pass keeps: the memory of each head less what values have in common, empty for few tokens."""

    W: Tensor
    z: Tensor
    c: Tensor


def empty_memory(way: str, q: Tensor, M: int, features: Features) -> Kept:
    """Return room for the memory of each head, (B, H, D, M), (B, H, D) and (B, H, M)."""
    B, _, H, R = q.shape
    if way == WEIGHTS:
        B = 0
    D, kept = features.size(R), PRODUCTS[q.dtype].kept
    wide = torch.promote_types(q.dtype, torch.float32)
    sizes = (B, H, D, M), (B, H, D), (B, H, M)
    return Kept(*(q.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, (kept, wide, wide), strict=True)))


def run(kernel: Any, grid: int, tensors: tuple[Any, ...], integers: tuple[int, ...], *constants: Any) -> None:
    """Launch a kernel. Its `constants`, options last, are bound once for each grid."""
    from fastweights.ops.gpu.launcher import Launch, dtypes_of, planned

    device, warps = _first(tensors).device, WARPS[constants[-1].C]
    if device.type != "cuda":
        kernel[(grid,)](*tensors, *integers, *constants, num_warps=warps, num_stages=STAGES)
        return
    dtypes = dtypes_of(tensors)
    key = (id(kernel), grid, device, dtypes, constants)
    launch = planned(key, lambda: Launch(kernel, grid, dtypes, len(integers), constants, warps, STAGES, device))
    launch(tensors, *integers)


def forward(call: Call, inputs: Inputs) -> tuple[Tensor, ...]:
    """Compute y (B, T, H, M), and `Kept` for the gradients."""
    from fastweights.ops.gpu.linear_attention import states, weights

    q, keys, vectors = _readable(inputs)
    (B, T, H, _), S = q.shape, keys[0].shape[1]
    y, kept = q.new_empty(B, T, H, call.M), empty_memory(call.way, q, call.M, call.features)
    strides, o = strides_of(q, *keys[:2]), options(call, H, centred=call.normalized)
    with use_device_of(q):
        if call.way == WEIGHTS:
            run(weights.weigh, B * H, (q, keys, vectors, y), (T, S), strides, o)
        elif call.way == ONE_LAUNCH:
            run(states.attend, B * H, (q, keys, vectors, tuple(kept), y), (T, S), strides, o)
        else:
            parts = _write_parts(states.write_keys, (keys, vectors), strides[2:], B, S, o)
            _join(parts, kept, o)
            run(states.read, B * H * -(-T // o.C), (q, vectors, tuple(kept), y), (T,), strides[:2], o)
    return y, *kept


def backward(call: Call, dy: Tensor, inputs: Inputs, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v under dy (B, T, H, M) from what the forward pass kept."""
    from fastweights.ops.gpu.linear_attention import states, weights

    (q, keys, vectors), dy = _readable(inputs), addressable(dy)
    k, v, _ = keys
    (B, T, H, _), S = q.shape, k.shape[1]
    grads = dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    (W, z, c), o, strides = kept, options(call, H), strides_of(q, k, v, dy)
    with use_device_of(q):
        if call.way == WEIGHTS:
            run(weights.weigh_gradients, B * H, (q, keys, vectors, dy, grads), (T, S), strides, o)
            return grads
        scale, dy_y = (z.new_empty((B, H, T) if call.normalized else (0,)) for _ in range(2))
        dW, dz = torch.empty_like(W), torch.empty_like(z)
        if call.way == ONE_LAUNCH:
            tensors = (q, keys, vectors, (W, z, c), dy, grads, scale, dy_y, dW, dz)
            run(states.attend_gradients, B * H, tensors, (T, S), strides, o)
            return grads
        of_queries, of_keys = (*strides[:2], *strides[6:]), strides[2:6]
        run(states.query_gradients, B * H * -(-T // o.C), (q, dy, vectors, W, z, dq, scale, dy_y), (T,), of_queries, o)
        parts = _write_parts(states.write_gradients, (q, dy, vectors, scale, dy_y), of_queries, B, T, o)
        _join(parts, Kept(dW, dz, c), o)
        run(states.key_gradients, B * H * -(-S // o.C), (keys, vectors, dW, dz, c, dk, dv), (S,), of_keys, o)
    return grads


def write(call: Call, k: Tensor, v: Tensor, mask: Tensor | None, vectors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the state of keys and values, W (B, H, D, M) and z (B, H, D), at least float32; z empty if unasked."""
    from fastweights.ops.gpu.linear_attention import states

    k, keys, vectors = _readable((k, k, v, mask, vectors))
    with use_device_of(k):
        o = options(call, k.shape[2])
        W, z = _write_parts(states.write_keys, (keys, vectors), strides_of(*keys[:2]), k.shape[0], k.shape[1], o)
    return (W[0], z[0]) if len(W) == 1 else (W.sum(0), z.sum(0))


def read(call: Call, q: Tensor, vectors: Tensor | None, W: Tensor, z: Tensor | None) -> Tensor:
    """Read a state with queries, (B, T, H, M)."""
    import triton.language as tl

    from fastweights.ops.gpu.linear_attention import states

    q, W = addressable(q), W.contiguous()
    z = W if z is None else z.contiguous()
    B, T, H, _ = q.shape
    y = q.new_empty(B, T, H, call.M)
    # The state has more digits than 16-bit queries; few queries take no longer for keeping them.
    exact = {} if call.dtype == torch.float64 else {"operand": tl.float32, "precision": "tf32x3"}
    width = {"block_D": 32, "block_R": power_of_two(call.R) if call.features.map in WHOLE else 32}
    o = options(call, H, block_M=power_of_two(call.M), **width, **exact)
    with use_device_of(q):
        run(states.read, B * H * -(-T // o.C), (q, _wide(vectors, q), (W, z, z), y), (T,), strides_of(q), o)
    return y


def _first(tensors: tuple[Any, ...]) -> Tensor:
    """Return the first tensor of those that a kernel takes, which are in tuples where they belong together."""
    x: Tensor = tensors[0][0] if isinstance(tensors[0], tuple) else tensors[0]
    return x


def _write_parts(
    kernel: Any, tensors: tuple[Any, ...], strides: tuple[int, ...], B: int, tokens: int, o: Any
) -> tuple[Tensor, Tensor]:
    """Launch a kernel that writes memories (parts, B, H, D, M) and (parts, B, H, D) of this many tokens."""
    blocks = -(-o.D // o.block_D)
    count, size = parts_of(B * o.H, blocks, tokens, o.C)
    x = _first(tensors)
    wide = torch.promote_types(x.dtype, torch.float32)
    W = x.new_empty((count, B, o.H, o.D, o.M), dtype=wide)
    z = x.new_empty((count, B, o.H, o.D) if o.normalized else (count, 0), dtype=wide)
    run(kernel, B * o.H * count * blocks, (*tensors, W, z), (tokens, B * o.H, size, count), strides, o)
    return W, z


def _join(parts: tuple[Tensor, Tensor], joined: Kept, o: Any) -> None:
    from fastweights.ops.gpu.linear_attention.states import join_parts

    count, heads = parts[0].shape[0], joined.z.shape[0] * joined.z.shape[1]
    run(join_parts, heads * -(-o.D // o.block_D), (*parts, tuple(joined)), (heads, count), o)


def _readable(inputs: Inputs) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return q, (k, v, mask) and vectors as kernels read them; where there is no mask or are no vectors, any tensor."""
    q, k, v, mask, vectors = inputs
    q, k, v = map(addressable, (q, k, v))
    return q, (k, v, q if mask is None else mask.contiguous().view(torch.uint8)), _wide(vectors, q)


def _wide(vectors: Tensor | None, q: Tensor) -> Tensor:
    return q if vectors is None else vectors.to(torch.promote_types(q.dtype, torch.float32)).contiguous()
