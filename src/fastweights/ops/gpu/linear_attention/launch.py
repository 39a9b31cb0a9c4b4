"""Launches the kernels of linear attention; how, is decided here by shapes. Triton is imported when they first run.

B sequences of T queries and S keys, H heads of R entries before the map and D after it, values of M.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.ops.features import Features
from fastweights.ops.gpu.device import use_device_of
from fastweights.ops.gpu.memory.strides import addressable, strides_of

# Ways to compute a call: all weights of a head at once; a head's memory, written and read in one launch; one launch for
# each step, with memories as sums of parts; a state that somebody keeps, written by one call and read by others.
WEIGHTS, ONE_LAUNCH, PARTS, KEPT = "weights", "one launch", "parts", "a state"
# Up to so many tokens, or with so many heads of all sequences together, a program does everything for a head.
SHORT, MANY_HEADS = 512, 128
# Programs that write parts of memories, and the fewest tiles of tokens of a part.
PROGRAMS, LEAST_TILES = 512, 4
# Queries that read a state at once: those of a few beams.
QUERIES = 16


class Call(NamedTuple):
    """What decides which kernels run, and how: one such call is checked on a GPU before others are made."""

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
# Maps of which every feature hangs on a whole head, or on any entry of it.
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
    """Return into how many parts memories of this many heads are cut, and the tokens of one, a multiple of C."""
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


def run(kernel: Any, grid: int, tensors: tuple[Tensor, ...], integers: tuple[int, ...], *constants: Any) -> None:
    """Launch a kernel. Its `constants`, options last, are bound once for each grid."""
    from fastweights.ops.gpu.memory.launcher import Launch, planned

    device, warps = tensors[0].device, WARPS[constants[-1].C]
    if device.type != "cuda":
        kernel[(grid,)](*tensors, *integers, *constants, num_warps=warps, num_stages=STAGES)
        return
    dtypes = tuple([x.dtype for x in tensors])
    key = (id(kernel), grid, device, dtypes, constants)
    launch = planned(key, lambda: Launch(kernel, grid, dtypes, len(integers), constants, warps, STAGES, device))
    launch(tensors, *integers)


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, vectors: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute y (B, T, H, M), and `Kept` for the gradients; `vectors` (m, R) are those of FAVOR+."""
    from fastweights.ops.gpu.linear_attention import states, weights

    q, k, v = map(addressable, (q, k, v))
    mask, vectors = _bytes(mask, q), _wide(vectors, q)
    (B, T, H, _), S = q.shape, k.shape[1]
    y, kept = q.new_empty(B, T, H, call.M), empty_memory(call.way, q, call.M, call.features)
    strides, o = strides_of(q, k, v), options(call, H, centred=call.normalized)
    with use_device_of(q):
        if call.way == WEIGHTS:
            run(weights.weigh, B * H, (q, k, v, mask, vectors, y), (T, S), strides, o)
        elif call.way == ONE_LAUNCH:
            run(states.attend, B * H, (q, k, v, mask, vectors, *kept, y), (T, S), strides, o)
        else:
            blocks = -(-o.D // o.block_D)
            count, tokens = parts_of(B * H, blocks, S, o.C)
            parts = _parts(count, kept)
            sizes = (S, B * H, tokens, count)
            run(states.write_keys, B * H * count * blocks, (k, v, mask, vectors, *parts), sizes, strides_of(k, v), o)
            _join(parts, kept, o)
            run(states.read, B * H * -(-T // o.C), (q, vectors, *kept, y), (T,), strides_of(q), o)
    return y, *kept


def backward(
    call: Call,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    vectors: Tensor | None,
    W: Tensor,
    z: Tensor,
    c: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v under dy (B, T, H, M) from what the forward pass kept."""
    from fastweights.ops.gpu.linear_attention import states, weights

    q, k, v, dy = map(addressable, (q, k, v, dy))
    mask, vectors = _bytes(mask, q), _wide(vectors, q)
    (B, T, H, _), S = q.shape, k.shape[1]
    grads = dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    kept, o = Kept(W, z, c), options(call, H)
    with use_device_of(q):
        if call.way == WEIGHTS:
            run(
                weights.weigh_gradients, B * H, (q, k, v, mask, vectors, dy, *grads), (T, S), strides_of(q, k, v, dy), o
            )
            return grads
        scale, along = (z.new_empty((B, H, T) if call.normalized else (0,)) for _ in range(2))
        dW, dz = torch.empty_like(W), torch.empty_like(z)
        if call.way == ONE_LAUNCH:
            tensors = (q, k, v, mask, vectors, *kept, dy, *grads, scale, along, dW, dz)
            run(states.attend_gradients, B * H, tensors, (T, S), strides_of(q, k, v, dy), o)
            return grads
        of_queries, of_keys = strides_of(q, dy), strides_of(k, v)
        run(states.query_gradients, B * H * -(-T // o.C), (q, dy, vectors, W, z, dq, scale, along), (T,), of_queries, o)
        blocks = -(-o.D // o.block_D)
        count, tokens = parts_of(B * H, blocks, T, o.C)
        parts = _parts(count, kept)
        sizes = (T, B * H, tokens, count)
        run(
            states.write_gradients, B * H * count * blocks, (q, dy, vectors, scale, along, *parts), sizes, of_queries, o
        )
        _join(parts, Kept(dW, dz, c), o)
        run(states.key_gradients, B * H * -(-S // o.C), (k, v, mask, vectors, dW, dz, c, dk, dv), (S,), of_keys, o)
    return grads


def write(call: Call, k: Tensor, v: Tensor, mask: Tensor | None, vectors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the state of keys and values, W (B, H, D, M) and z (B, H, D), at least float32; z empty if unasked."""
    from fastweights.ops.gpu.linear_attention import states

    k, v = map(addressable, (k, v))
    B, S, H, _ = k.shape
    o = options(call, H)
    blocks = -(-o.D // o.block_D)
    count, tokens = parts_of(B * H, blocks, S, o.C)
    wide = torch.promote_types(call.dtype, torch.float32)
    W = k.new_empty(count, B, H, o.D, o.M, dtype=wide)
    z = k.new_empty((count, B, H, o.D) if call.normalized else (count, 0), dtype=wide)
    with use_device_of(k):
        tensors, sizes = (k, v, _bytes(mask, k), _wide(vectors, k), W, z), (S, B * H, tokens, count)
        run(states.write_keys, B * H * count * blocks, tensors, sizes, strides_of(k, v), o)
    return (W[0], z[0]) if count == 1 else (W.sum(0), z.sum(0))


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
        run(states.read, B * H * -(-T // o.C), (q, _wide(vectors, q), W, z, z, y), (T,), strides_of(q), o)
    return y


def _parts(count: int, kept: Kept) -> tuple[Tensor, Tensor]:
    """Return room for the parts of memories."""
    wide = kept.z.dtype
    return kept.W.new_empty((count, *kept.W.shape), dtype=wide), kept.z.new_empty((count, *kept.z.shape))


def _join(parts: tuple[Tensor, Tensor], joined: Kept, o: Any) -> None:
    from fastweights.ops.gpu.linear_attention.states import join_parts

    count, heads = parts[0].shape[0], joined.z.shape[0] * joined.z.shape[1]
    run(join_parts, heads * -(-o.D // o.block_D), (*parts, *joined), (heads, count), o)


def _bytes(mask: Tensor | None, q: Tensor) -> Tensor:
    """Return the mask as kernels read it; where there is none, any tensor."""
    return q if mask is None else mask.contiguous().view(torch.uint8)


def _wide(vectors: Tensor | None, q: Tensor) -> Tensor:
    """Return the vectors as kernels read them; where there are none, any tensor."""
    return q if vectors is None else vectors.to(torch.promote_types(q.dtype, torch.float32)).contiguous()
