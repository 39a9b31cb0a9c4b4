"""Launch configurations of the kernels: a fixed table by data type and head size, no autotuning.

A variant is one way to compute a call. There are three kinds: `FusedWalk` and `SplitWalk` go through a sequence chunk
by chunk, `RecurrentWalk` token by token. `candidates` lists those that come into question for a call, best first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastweights.ops.features import PLAIN, Features

# How products are formed: from 16-bit operands (those of the data, float16 in the inverse), from float32 rounded to
# TF32, from three TF32 products (21 bits), or in plain float32.
PRECISIONS = ("16-bit", "tf32", "tf32x3", "ieee")
HALF, TF32, TF32X3, IEEE = PRECISIONS

LARGEST_D, LARGEST_M = 512, 256


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What every kind of walk has."""

    chunk: int
    """Tokens from one state that is kept for the backward pass to the next; chunked walks take them in one step."""
    precision: str
    """How products are formed, one of `PRECISIONS`."""
    forward_warps: int
    """Warps of a program of the forward walk."""
    forward_stages: int
    """Chunks (recurrent walks: tiles of tokens) that it has in flight: its loads run this far ahead, less one."""
    backward_warps: int
    backward_stages: int

    @property
    def step(self) -> int:
        """Tokens that a chunked walk takes at once."""
        return self.chunk

    @property
    def prepared(self) -> bool:
        """Whether what the tokens of a chunk make of each other comes from a launch before the walk."""
        return False


@dataclass(frozen=True, kw_only=True)
class ChunkedWalk(Variant):
    """What both kinds of chunked walk have."""

    columns: int
    """Values (columns of the state) that one program of a walk takes."""
    solve: str
    """How the products in the triangular inverse are formed, one of `PRECISIONS`."""
    groups: int = 0
    """Stretches that a long sequence is cut into, to be walked side by side; 0 for none."""
    gather: bool = False
    """DPFP on chip: load the factors of every feature one by one, instead of selecting them from a tile by products."""
    both_ways: bool = False
    """Load tiles needed in both orientations twice: few warps transpose by shuffles, and without copying ahead."""
    prefetch: bool = False
    """Walks of the delta rule in bfloat16 and float32 read nothing that the compiler would not copy ahead, those of
    other rules and of mapped keys less of it. bfloat16 values come in by a product with the unit matrix, the gradient
    of a gate that erases and writes from the diagonal of a product; with `both_ways` a float32 tile is loaded for each
    operand that it is; the sums of mapped queries are formed once."""


@dataclass(frozen=True, kw_only=True)
class FusedWalk(ChunkedWalk):
    """One launch each way: the walk back computes every gradient. Small heads."""

    @property
    def prepared(self) -> bool:
        # Every group is walked more than once: what is the same each time is better formed once.
        return self.groups > 0


@dataclass(frozen=True, kw_only=True)
class SplitWalk(ChunkedWalk):
    """The walk back computes what is serial; a second launch over chunks side by side all other gradients."""

    prepare_warps: int
    """Warps of the launch for the inverses and scores of all chunks."""
    gradient_warps: int
    """Warps of the launch for the gradients."""
    gradient_stages: int = 1
    """How far the loads of that launch run ahead, over chunks or over tiles of keys."""
    key_tile: int
    """Features of the keys that both launches over chunks take at a time; all of them where keys are mapped on chip."""
    steps: int = 1
    """Steps in which the walks take a chunk: shorter ones take fewer registers, the gradients longer chunks."""
    chunks_per_program: int = 1
    """Chunks that a program of the launch for the gradients takes one after the other."""

    def tile(self, features: int) -> int:
        """Return how many of these features, padded to a power of two, launches over chunks take at a time."""
        # Tiles narrower than 64 beside 64 tokens end in an illegal memory access on Hopper (Triton 3.6).
        return min(self.key_tile, features if self.chunk < 64 else max(features, 64))

    @property
    def step(self) -> int:
        return self.chunk // self.steps

    @property
    def prepared(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class RecurrentWalk(Variant):
    """One launch each way, token by token and without inverses, with the state in registers. Small heads in float32."""

    lanes: int
    """Lanes of a warp that share what the state holds of one value."""


AnyVariant = TypeVar("AnyVariant", bound=Variant)
_KINDS: tuple[type[Variant], ...] = (FusedWalk, SplitWalk, RecurrentWalk)
_NAMES = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS}
_DECODERS: dict[str, Callable[[int], Any]] = {"str": PRECISIONS.__getitem__, "bool": bool, "int": int}


def to_integers(variant: Variant) -> list[int]:
    """Return the variant as a custom op takes it: the number of its kind, then its fields."""
    kind = type(variant)
    return [_KINDS.index(kind), *[_code(getattr(variant, name)) for name in _NAMES[kind]]]


def _code(value: Any) -> int:
    return PRECISIONS.index(value) if isinstance(value, str) else int(value)


def from_integers(codes: Sequence[int]) -> Variant:
    """Return the variant that `to_integers` made these of."""
    kind = _KINDS[codes[0]]
    return kind(**{f.name: _DECODERS[str(f.type)](code) for f, code in zip(fields(kind), codes[1:], strict=True)})


def _changed(variant: AnyVariant, **changes: Any) -> AnyVariant:
    """As `dataclasses.replace`, written so that `torch.compile` can trace it."""
    kind = type(variant)
    return kind(**{name: changes[name] if name in changes else getattr(variant, name) for name in _NAMES[kind]})


def _fused(chunk: int, columns: int, precision: str, warps: int, stages: int) -> FusedWalk:
    return FusedWalk(
        chunk=chunk,
        columns=columns,
        precision=precision,
        solve=precision,
        forward_warps=warps,
        forward_stages=stages,
        backward_warps=warps,
        backward_stages=stages,
        both_ways=True,
        prefetch=True,
    )


def _split(
    chunk: int,
    columns: int,
    precision: str,
    walk: tuple[int, int],
    gradients: tuple[int, int],
    **more: Any,
) -> SplitWalk:
    """`walk` is (warps, stages) of both walks, `gradients` (warps, key_tile) of the launch for the gradients."""
    few = walk[0] <= 2
    row = SplitWalk(
        chunk=chunk,
        columns=columns,
        precision=precision,
        solve=precision,
        forward_warps=walk[0],
        forward_stages=walk[1],
        backward_warps=walk[0],
        backward_stages=walk[1],
        prepare_warps=1,
        gradient_warps=gradients[0],
        key_tile=gradients[1],
        both_ways=few,
        prefetch=few,
    )
    return _changed(row, **more)


def _recurrent(forward: tuple[int, int], backward: tuple[int, int]) -> RecurrentWalk:
    """(warps, stages) of both walks."""
    return RecurrentWalk(
        chunk=16,
        precision=TF32X3,
        forward_warps=forward[0],
        forward_stages=forward[1],
        backward_warps=backward[0],
        backward_stages=backward[1],
        lanes=2,
    )


# The largest D and M a row is for, smallest first. float16 takes TF32 products: its range is too short for a state.
# Rows for 16, 32, 64 and 128 of each, 32 x 16 and 64 x 16 were measured on an H200 with the delta rule in bfloat16,
# all up to 64 x 64 in float32, and in float16 those of 16, 32 and 64 of each. Walks of eight warps with steps of 64 are
# miscompiled (Triton 3.6): no row may have them.
TABLE: dict[torch.dtype, dict[tuple[int, int], FusedWalk | SplitWalk]] = {
    torch.bfloat16: {
        (16, 16): _fused(16, 16, HALF, 1, 3),
        (32, 16): _fused(16, 16, HALF, 1, 3),
        (32, 32): _fused(16, 32, HALF, 1, 4),
        (64, 16): _fused(16, 16, HALF, 1, 3),
        (64, 32): _split(64, 32, HALF, (4, 3), (4, 64), steps=2),
        (64, 64): _split(64, 64, HALF, (4, 3), (4, 64), steps=2),
        (128, 128): _split(64, 64, HALF, (4, 3), (4, 64), steps=2),
        (128, 256): _split(64, 64, HALF, (4, 3), (8, 64), steps=2),
        (256, 256): _split(64, 32, HALF, (8, 2), (8, 64), steps=2),
        (512, 256): _split(16, 16, HALF, (8, 1), (8, 64)),
    },
    torch.float16: {
        (32, 16): _fused(16, 16, TF32, 1, 3),
        (32, 32): _fused(16, 32, TF32, 2, 3),
        (64, 64): _split(16, 32, TF32, (2, 2), (4, 64)),
        (128, 128): _split(16, 32, TF32, (4, 2), (8, 32)),
        (512, 256): _split(16, 16, TF32, (8, 1), (8, 32)),
    },
    torch.float32: {
        (16, 16): _fused(16, 16, TF32X3, 1, 3),
        (32, 16): _split(16, 16, TF32X3, (1, 3), (1, 32), chunks_per_program=4, gradient_stages=2),
        (32, 32): _split(16, 32, TF32X3, (2, 3), (2, 32), chunks_per_program=6, gradient_stages=3),
        # Four warps transpose a tile well, but `prefetch` loads for each operand only with `both_ways`.
        (64, 64): _split(16, 32, TF32X3, (4, 2), (4, 64), both_ways=True, prefetch=True),
        (512, 256): _split(16, 16, TF32X3, (8, 1), (8, 64)),
    },
    # The interpreter only: tests compare gradients with finite differences in it.
    torch.float64: {(512, 256): _split(16, 32, IEEE, (4, 1), (4, 64))},
}

# The most features or values of all heads together: with 32 of the other, and LONG tokens in chunks, states are within
# 32 bits, in which recurrent walks count entries.
WIDEST = 2**18
# Rows for rules without decay and sequences shorter than `LONG`: sums over more tokens one by one would lose digits.
RECURRENT_ROWS: dict[torch.dtype, dict[tuple[int, int], RecurrentWalk]] = {
    torch.float32: {
        (16, 16): _recurrent((1, 3), (1, 3)),
        (32, 16): _recurrent((1, 2), (1, 2)),
        (32, 32): _recurrent((1, 4), (2, 3)),
    },
}

# Rows for keys that are mapped on chip, where they do not follow from those above.
MAPPED_ROWS: dict[torch.dtype, dict[tuple[int, int], FusedWalk | SplitWalk]] = {
    torch.bfloat16: {
        (32, 32): _fused(16, 32, HALF, 1, 3),
        # Forward 54 us with one warp and 86 with two, back 194 and 171.
        (64, 16): _changed(_fused(16, 16, HALF, 1, 2), backward_warps=2),
    },
    torch.float32: {
        (16, 16): _split(16, 16, TF32X3, (1, 3), (1, 16), chunks_per_program=4, gradient_stages=2),
    },
}

# Up to FEW walks (sequences times heads) leave most of a GPU idle. Those of at least LONG tokens are cut into groups,
# so that there are about PROGRAMS programs for each half of FEW; with fewer groups, or fewer chunks in one, the second
# walk does not pay. The second half has to be longer, with D up to 64.
FEW, LONG = 64, 2048
PROGRAMS, MOST_GROUPS, LEAST_GROUPS, LEAST_CHUNKS = 256, 64, 8, 4
# Programs that fill a GPU without groups, where each takes some of many values.
ENOUGH = 128

# Decays per key: warps of the launch before the walks, by the tokens of a chunk, and how many features that takes at a
# time; warps of the launch for the gradients of chunks that fade too fast for the other.
_PER_KEY = {16: {"prepare_warps": 2}, 64: {"prepare_warps": 1}}
PER_KEY_TILE, STEEP_WARPS = 32, 8

LARGEST_MAPPED = 256
# The most values that fit beside up to this many features, in every dtype, on chips of compute capability 8.0.
LARGEST_M_MAPPED = {128: 128, LARGEST_MAPPED: 32}
# The largest heads of which a map may make more than 128 features of products: their factors lie on chip, too.
LARGEST_HEAD_MAPPED = 32
# The most values beside tiles of exactly this many features for which all gradients come from one launch where products
# take 16 bits.
_LARGEST_M_WALKED = {64: 32, 128: 16}
# A feature map is computed whole by every kernel, so all D have to fit in one tile of the one for the gradients, which
# takes registers: (chunk, prepare_warps, gradient_warps) of split walks, for up to D.
_MAPPED = {32: (16, 1, 2), 64: (32, 2, 4), 128: (16, 4, 8), 256: (16, 8, 8)}


def _mapped(row: FusedWalk | SplitWalk, D: int, M: int) -> FusedWalk | SplitWalk:
    """Return a row for keys that come mapped as it is where D of them are mapped on chip."""
    # Products of three parts are much code for selecting entries.
    gather = row.precision != HALF
    if isinstance(row, FusedWalk):
        return _changed(row, gather=gather)
    size = power_of_two(D)
    if row.precision == HALF and _LARGEST_M_WALKED.get(size, 0) >= M:
        # One launch each way forms the maps once less: DPFP-3 of the smallest heads takes 0.54 ms instead of 1.64.
        # With `prefetch` both are 3 % slower.
        return _changed(_fused(16, row.columns, HALF, 2, 2), prefetch=False)
    chunk, prepare_warps, gradient_warps = next(row for keys, row in _MAPPED.items() if keys >= D)
    warps = {"prepare_warps": prepare_warps, "gradient_warps": gradient_warps}
    return _changed(row, chunk=min(chunk, row.chunk), steps=1, key_tile=size, gather=gather, **warps)


def may_go_by_token(decay: bool, H: int, D: int, M: int) -> bool:
    """Say whether there are recurrent walks for such a rule and heads."""
    return not decay and H * max(D, M) <= WIDEST


def plain_rows() -> Iterator[tuple[torch.dtype, int, int, Variant]]:
    """Yield every row for keys that come mapped, with the dtype and the largest D and M it is for."""
    for table in (TABLE, RECURRENT_ROWS):
        for dtype, rows in table.items():
            for (D, M), row in rows.items():
                yield dtype, D, M, row


def holds_features(R: int, D: int, M: int) -> bool:
    """Say whether D features of heads of size R can be computed inside the kernels, beside values of size M."""
    few = min(LARGEST_M_MAPPED)
    if few < D and LARGEST_HEAD_MAPPED < R < D:
        return False
    return next((values for features, values in LARGEST_M_MAPPED.items() if features >= D), 0) >= M


def candidates(
    D: int, M: int, dtype: torch.dtype, walks: int, T: int, features: Features = PLAIN, by_token: bool = True
) -> list[Variant]:
    """Return the variants for keys of size D, values of size M, and `walks` pairs of sequence and head, best first.

    `by_token` says whether a recurrent walk may be among them (`may_go_by_token`). The last one is a chunked walk.
    """
    if T == 1 and dtype == torch.bfloat16:
        # All comes from the state that is given, and a gate's gradient is one sum over it, which may cancel: the state
        # needs more than 8 bits. The launch takes longer than products of one token, whatever they are.
        dtype = torch.float16
    found: list[Variant] = []
    if T < LONG and by_token and not features.maps and not features.logits:
        found += _that_hold(RECURRENT_ROWS.get(dtype, {}), D, M)[:1]
    rows = TABLE[dtype] | MAPPED_ROWS.get(dtype, {}) if features.maps else TABLE[dtype]
    row = _that_hold(rows, D, M)[0]
    row = _mapped(row, D, M) if features.maps else row
    # A transition between groups is D x D and has to fit on chip.
    many, programs = walks > FEW // 2, walks * -(-M // row.columns)
    if walks > FEW or T < LONG or D > 128 or (many and (T < 4 * LONG or D > 64)) or programs >= ENOUGH:
        return [*found, row]
    wanted = 2 * PROGRAMS if many else PROGRAMS
    grouped = _changed(row, groups=min(MOST_GROUPS, max(LEAST_GROUPS, wanted // programs)))
    return [*found, grouped if group_length(T, None, grouped) else row]


def _that_hold(rows: Mapping[tuple[int, int], AnyVariant], D: int, M: int) -> list[AnyVariant]:
    return [row for (keys, values), row in rows.items() if keys >= D and values >= M]


def per_key_candidates(D: int, M: int, dtype: torch.dtype, T: int) -> list[Variant]:
    """Return the variants for decays per key channel: those in which other launches prepare and finish the walks."""
    dtype = torch.float16 if T == 1 and dtype == torch.bfloat16 else dtype
    rows = {size: row for size, row in TABLE[dtype].items() if isinstance(row, SplitWalk)}
    row = _that_hold(rows, D, M)[0]
    warps = next(warps for chunk, warps in _PER_KEY.items() if chunk >= row.chunk)
    return [_changed(row, chunks_per_program=1, gradient_stages=1, gradient_warps=4, **warps)]


def configuration(
    D: int, M: int, dtype: torch.dtype, walks: int, T: int, features: Features = PLAIN, by_token: bool = True
) -> Variant:
    """Return the best of the `candidates`."""
    return candidates(D, M, dtype, walks, T, features, by_token)[0]


def power_of_two(n: int) -> int:
    """Return the least power of two that holds n and fills a matrix product."""
    return max(16, 1 << (n - 1).bit_length())


def group_length(T: int, cu_seqlens: Tensor | None, variant: Variant) -> int:
    """Return the tokens in a group, a multiple of the chunk; 0 where groups would not pay, or sequences are packed."""
    if cu_seqlens is not None or not isinstance(variant, ChunkedWalk) or variant.groups == 0:
        return 0
    length = max(-(-T // (variant.groups * variant.chunk)), LEAST_CHUNKS) * variant.chunk
    return 0 if (LEAST_GROUPS - 1) * length >= T else length


def number_of_groups(T: int, cu_seqlens: Tensor | None, variant: Variant) -> int:
    """Return how many groups a sequence is cut into; 0 for none."""
    length = group_length(T, cu_seqlens, variant)
    return -(-T // length) if length else 0
