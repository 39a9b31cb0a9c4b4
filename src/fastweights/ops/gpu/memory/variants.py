"""Launch configurations: a fixed table by data type and head size, no autotuning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.ops.features import PLAIN, Features

# How products are formed: from 16-bit operands (those of the data, float16 in the inverse), from float32 rounded to
# TF32, from three TF32 products (21 bits), or in plain float32. A configuration holds the index into this tuple.
PRECISIONS = ("16-bit", "tf32", "tf32x3", "ieee")
HALF, TF32, TF32X3, IEEE = range(4)

LARGEST_D, LARGEST_M = 512, 256


class Config(NamedTuple):
    """One row of the table. All integers, so that it passes through a custom op.

    A walk takes `chunk` tokens a step and `columns` of the state a program. With `prepared` the inverses of the chunks
    come from a launch of their own, over chunks side by side. With `fused` the walk back computes every gradient;
    otherwise a second launch over chunks does, whose programs take `features` of D at a time. `stages` is how far loads
    run ahead in a walk. `precision` and `solve` are how products and how the triangular inverse are formed. Long
    sequences are cut into `groups` that walk side by side, where that is not 0. With `gather` DPFP loads the factors of
    every feature, else it takes them from a tile by products. With `twice` walks load a tile that they need both ways
    twice instead of turning it on chip: few warps turn tiles by shuffles, and what is turned is not copied
    ahead. A program of the launch for the gradients takes `batch` chunks one after the other;
    `chunk_stages` is how far its loads run ahead, over chunks or over tiles of `features`. With `ahead` walks of the
    delta rule in bfloat16 and float32 read nothing that the compiler would not copy ahead, and those of other rules and
    of mapped keys less: bfloat16 values come in by a product with the unit matrix, the gradient of one gate that does
    both from the diagonal of a product, and with `twice` a float32 tile is loaded for each operand it is; and the sums
    of mapped queries are formed once. With `lanes` both walks go token by token, without inverses, and so many lanes
    share what the state holds of one value.
    """

    chunk: int
    columns: int
    precision: int
    solve: int
    fused: int
    prepared: int
    forward_warps: int
    forward_stages: int
    backward_warps: int
    backward_stages: int
    invert_warps: int
    chunk_warps: int
    features: int
    groups: int = 0
    gather: int = 0
    twice: int = 0
    batch: int = 1
    chunk_stages: int = 1
    ahead: int = 0
    lanes: int = 0


_FIELDS = Config._fields


def _changed(config: Config, **changes: int) -> Config:
    """As `config._replace`, which `torch.compile` in PyTorch 2.11 takes for a row without entries."""
    return Config(*[changes[name] if name in changes else getattr(config, name) for name in _FIELDS])


def _fused(chunk: int, columns: int, precision: int, solve: int, warps: int, stages: int) -> Config:
    return Config(chunk, columns, precision, solve, 1, 0, warps, stages, warps, stages, 1, 1, 16, twice=1, ahead=1)


def _split(
    chunk: int,
    columns: int,
    precision: int,
    solve: int,
    walk: tuple[int, int],
    invert_warps: int,
    chunks: tuple[int, int],
) -> Config:
    """`walk` is (warps, stages) of both walks, `chunks` (warps, features) of the launch for the gradients."""
    few = int(walk[0] <= 2)
    return Config(chunk, columns, precision, solve, 0, 1, *walk, *walk, invert_warps, *chunks, twice=few, ahead=few)


# The largest D and M a row is for, smallest first. float16 takes TF32 products: its range is too short for a state.
# Rows for 16, 32, 64 and 128 of each, 32 x 16 and 64 x 16 were measured on an H200 with the delta rule in bfloat16,
# all up to 64 x 64 in float32, and in float16 those of 16, 32 and 64 of each. Eight warps at chunk 64 are miscompiled
# (Triton 3.6): no row may have them.
TABLE: dict[torch.dtype, dict[tuple[int, int], Config]] = {
    torch.bfloat16: {
        (16, 16): _fused(16, 16, HALF, HALF, 1, 3),
        (32, 16): _fused(16, 16, HALF, HALF, 1, 3),
        (32, 32): _fused(16, 32, HALF, HALF, 1, 4),
        (64, 16): _fused(16, 16, HALF, HALF, 1, 3),
        # Not the row below: chunks of 64 with fewer than 64 values have ended in an illegal memory access.
        (64, 32): _split(32, 32, HALF, HALF, (4, 2), 1, (4, 64)),
        (64, 64): _split(64, 64, HALF, HALF, (4, 2), 1, (4, 64)),
        (128, 128): _changed(_split(32, 64, HALF, HALF, (4, 2), 1, (4, 128)), backward_stages=3),
        (256, 256): _split(32, 32, HALF, HALF, (8, 2), 1, (8, 64)),
        (512, 256): _split(16, 16, HALF, HALF, (8, 1), 1, (8, 64)),
    },
    torch.float16: {
        (32, 16): _fused(16, 16, TF32, TF32, 1, 3),
        (32, 32): _fused(16, 32, TF32, TF32, 2, 3),
        (64, 64): _split(16, 32, TF32, TF32, (2, 2), 1, (4, 32)),
        (128, 128): _split(16, 32, TF32, TF32, (4, 2), 1, (8, 32)),
        (512, 256): _split(16, 16, TF32, TF32, (8, 1), 1, (8, 32)),
    },
    torch.float32: {
        (16, 16): _fused(16, 16, TF32X3, TF32X3, 1, 3),
        (32, 16): _changed(_split(16, 16, TF32X3, TF32X3, (1, 3), 1, (1, 32)), batch=4, chunk_stages=2),
        (32, 32): _changed(_split(16, 32, TF32X3, TF32X3, (2, 3), 1, (2, 32)), batch=6, chunk_stages=3),
        # Four warps turn a tile well, but `ahead` loads for each operand only with `twice`.
        (64, 64): _changed(_split(16, 32, TF32X3, TF32X3, (4, 2), 1, (4, 32)), chunk_stages=2, twice=1, ahead=1),
        (512, 256): _split(16, 16, TF32X3, TF32X3, (8, 1), 1, (8, 16)),
    },
    # The interpreter only: tests compare gradients with finite differences in it.
    torch.float64: {(512, 256): _split(16, 32, IEEE, IEEE, (4, 1), 1, (4, 64))},
}


def _by_token(forward: tuple[int, int], backward: tuple[int, int]) -> Config:
    """Warps and stages of the walks."""
    return Config(16, 32, TF32X3, TF32X3, 1, 0, *forward, *backward, 1, 1, 16, lanes=2)


# So many features or values of all heads: with 32 of the other, and LONG tokens in chunks, states are within 32 bits.
WIDEST = 2**18
# Rows for rules without decay and sequences shorter than `LONG`: sums over more tokens one by one would lose digits.
TOKEN_ROWS: dict[torch.dtype, dict[tuple[int, int], Config]] = {
    torch.float32: {
        (16, 16): _by_token((1, 3), (1, 3)),
        (32, 16): _by_token((1, 2), (1, 2)),
        (32, 32): _by_token((1, 4), (2, 3)),
    },
}

# Rows for keys that are mapped on chip, where they do not follow from those above.
MAPPED_ROWS: dict[torch.dtype, dict[tuple[int, int], Config]] = {
    torch.bfloat16: {
        (32, 32): _fused(16, 32, HALF, HALF, 1, 3),
        # Forward 54 us with one warp and 86 with two, back 194 and 171.
        (64, 16): _changed(_fused(16, 16, HALF, HALF, 1, 2), backward_warps=2),
    },
    torch.float32: {
        (16, 16): _changed(_split(16, 16, TF32X3, TF32X3, (1, 3), 1, (1, 16)), batch=4, chunk_stages=2),
    },
}

# Up to so many walks (sequences times heads) leave most of a GPU idle. Those of so many tokens are cut into groups, so
# that there are about so many programs for each half of them; with fewer groups, or fewer chunks in one, the second
# walk does not pay. The second half has to be longer, with D up to 64.
FEW, LONG = 64, 2048
PROGRAMS, MOST_GROUPS, LEAST_GROUPS, LEAST_CHUNKS = 256, 64, 8, 4


LARGEST_MAPPED = 256
# So many values fit beside up to so many features, in every dtype, on chips of compute capability 8.0.
LARGEST_M_MAPPED = {128: 128, LARGEST_MAPPED: 32}
# So many values beside tiles of just so many features are walked with all gradients in one launch where products take
# 16 bits.
_LARGEST_M_WALKED = {64: 32, 128: 16}
# A feature map is computed whole by every kernel, so all D have to fit in one tile of the one for the gradients, which
# takes registers: (chunk, warps to invert, warps for gradients) of the rows whose kernels are split, for up to D.
_MAPPED = {32: (16, 1, 2), 64: (32, 2, 4), 128: (16, 4, 8), 256: (16, 8, 8)}


def _mapped(config: Config, D: int, M: int) -> Config:
    """The row for keys that come mapped, as it is where D of them are mapped on chip."""
    size = power_of_two(D)
    # Products of three parts are much code for picking entries.
    config = _changed(config, features=size, gather=int(config.precision != HALF))
    if config.fused:
        return config
    if config.precision == HALF and _LARGEST_M_WALKED.get(size, 0) >= M:
        # One launch each way forms the maps once less: DPFP-3 of the smallest heads takes 0.54 ms instead of 1.64.
        # With `ahead` both are 3 % slower.
        walk = {
            "forward_warps": 2,
            "forward_stages": 2,
            "backward_warps": 2,
            "backward_stages": 2,
            "twice": 1,
            "ahead": 0,
        }
        return _changed(config, fused=1, prepared=0, chunk=16, **walk)
    chunk, invert_warps, chunk_warps = next(row for keys, row in _MAPPED.items() if keys >= D)
    return _changed(config, chunk=min(chunk, config.chunk), invert_warps=invert_warps, chunk_warps=chunk_warps)


def may_go_by_token(decay: bool, H: int, D: int, M: int) -> bool:
    """Whether there are walks token by token for such a rule and heads: those count entries in 32 bits."""
    return not decay and H * max(D, M) <= WIDEST


def forget_token_rows() -> None:
    """From now on walk by chunks wherever a sequence would have been walked token by token."""
    TOKEN_ROWS.clear()


def plain_rows() -> Iterator[tuple[torch.dtype, int, int, Config]]:
    """Every row for keys that come mapped, with the dtype and the largest D and M it is for."""
    for table in (TABLE, TOKEN_ROWS):
        for dtype, rows in table.items():
            for (D, M), config in rows.items():
                yield dtype, D, M, config


def holds_features(D: int, M: int) -> bool:
    """Whether phi of D features can be computed inside the kernels, beside values of size M."""
    room = next((values for features, values in LARGEST_M_MAPPED.items() if features >= D), 0)
    return room >= M


def configuration(
    D: int, M: int, dtype: torch.dtype, walks: int, T: int, features: Features = PLAIN, by_token: bool = True
) -> Config:
    """The shipped configuration for keys of size D, values of size M, and `walks` pairs of sequence and head.

    `by_token` says whether it may be one that goes token by token (`may_go_by_token`).
    """
    if T == 1 and dtype == torch.bfloat16:
        # All comes from the state that is given, and a gate's gradient is one sum over it, which may cancel: the state
        # needs more than 8 bits. The launch takes longer than products of one token, whatever they are.
        dtype = torch.float16
    rows = TABLE[dtype]
    if features.map:
        rows = rows | MAPPED_ROWS.get(dtype, {})
    elif T < LONG and by_token and not features.logits:
        rows = rows | TOKEN_ROWS.get(dtype, {})
    config = next(row for (keys, values), row in rows.items() if keys >= D and values >= M)
    if features.map:
        config = _mapped(config, D, M)
    # A transition between groups is D x D and has to fit on chip.
    many = walks > FEW // 2
    if walks > FEW or T < LONG or D > 128 or (many and (T < 4 * LONG or D > 64)):
        return config
    programs = 2 * PROGRAMS if many else PROGRAMS
    # Every group is walked more than once: its inverses are better formed once.
    grouped = _changed(config, groups=min(MOST_GROUPS, programs // walks), prepared=1)
    return grouped if group_length(T, None, grouped) else config


def power_of_two(n: int) -> int:
    """The least power of two that holds n and fills a matrix product."""
    return max(16, 1 << (n - 1).bit_length())


def group_length(T: int, cu_seqlens: Tensor | None, config: Config) -> int:
    """Tokens in a group, a multiple of the chunk; 0 where groups would not pay, or sequences are packed."""
    if cu_seqlens is not None or config.groups == 0:
        return 0
    length = max(-(-T // (config.groups * config.chunk)), LEAST_CHUNKS) * config.chunk
    return 0 if (LEAST_GROUPS - 1) * length >= T else length


def kept_shapes(
    shape: tuple[int, ...], M: int, erase: bool, cu_seqlens: Tensor | None, keep: bool, config: Config
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of the states before each chunk, of the chunks' inverses, one slot a chunk, and of the tokens' errors.

    `shape` is (B, T, H, D) with the D of mapped keys. With packed sequences the number of chunks hangs on
    their lengths; the number of slots bounds it. What is not kept has no slots.
    """
    (B, T, H, D), C = shape, config.chunk
    slots = B * -(-T // C) if cu_seqlens is None else T // C + cu_seqlens.numel() - 1
    inverses = erase and not config.lanes and (keep or bool(config.prepared))
    errors = (B if erase and keep else 0, T, H, M)
    return (slots if keep else 0, H, M, D), (slots if inverses else 0, H, C, C), errors


def number_of_groups(T: int, cu_seqlens: Tensor | None, config: Config) -> int:
    """Groups that a sequence is cut into; 0 for none."""
    length = group_length(T, cu_seqlens, config)
    return -(-T // length) if length else 0


def operand_dtype(data: torch.dtype, state: torch.dtype, config: Config) -> torch.dtype:
    """What products take and what is kept for backward is stored in: the dtype of the data, or that of the state."""
    return data if config.precision == HALF else state
