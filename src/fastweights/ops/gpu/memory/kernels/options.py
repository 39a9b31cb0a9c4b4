"""What the kernels are compiled for: one frozen object that kernels and their helpers take as an argument."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from fastweights.ops.features import Features


@dataclass(frozen=True, kw_only=True)
class TileOptions:
    """What tiles of heads, their maps and their products are compiled for, `o` in the code."""

    H: int
    """Heads."""
    R: int
    """Features of keys and queries as they lie in memory."""
    D: int
    """Features of keys and queries after the map, as the state has them; R without a map."""
    M: int = 0
    """Features of values."""
    C: int = 0
    """Tokens of a tile. In the memory those of a chunk; in its walks, those that are taken at once."""
    block_R: int = 0
    """Entries of a tile: R, D and M padded to powers of two, or the part that a program takes at a time."""
    block_D: int = 0
    block_M: int = 0

    map: str = "none"
    """phi, by the name of its fused form in maps.py."""
    sum: bool = False
    """phi is divided by its sum."""
    gather: bool = False
    """DPFP: load the factors of each feature one by one, instead of selecting them by products."""
    normalized: bool = False
    """Divide what is read by the sum of the weights (attention normalisation)."""
    both_ways: bool = False
    """Load tiles that are needed in both orientations twice; see `variants.ChunkedWalk`."""

    operand: tl.dtype = tl.float32
    """What products take and what is kept for the backward pass."""
    acc: tl.dtype = tl.float32
    """States and sums."""
    precision: str = "ieee"
    """How products are formed: "ieee" (also for 16-bit operands), "tf32" or "tf32x3"."""


@dataclass(frozen=True, kw_only=True)
class Options(TileOptions):
    """What a kernel of the memory is compiled for. Options that it does not know keep their defaults."""

    steps: int = 1
    """Steps of C tokens in which a walk takes a chunk, before which it keeps the state."""
    unit: int = 1
    """Strides of q, k, v and dy come in units of this many entries: the compiler can then load that many at once."""

    decay: bool = False
    """The rule has a coefficient a: W = a W ..."""
    erase: bool = False
    """... e: - e (a W k) k^T ..."""
    write: bool = False
    """... w: + w v k^T, not the same as e."""
    per_key: bool = False
    """... or a is a decay for each key channel, given as its logarithm: walks take keys and queries already faded."""
    tied: bool = False
    """e is also w (the delta rule): one gate to read, and one gradient."""
    logits: bool = False
    """Coefficients come as logits: the kernels take their sigmoids."""

    packed: bool = False
    """Sequences follow each other in one row, with bounds in cu_seqlens."""
    grouped: bool = False
    """The packed sequences are groups of chunks of one sequence."""
    prepared: bool = False
    """Z and P of the chunks are in memory already."""
    only_faded: bool = False
    """`prepare_chunks` fades keys and queries and forms no tiles."""
    steep: bool = False
    """`key_decay_gradients` takes the chunks that it left out without this, since they fade too fast."""
    planes: int = 1
    """Tiles that are kept of a chunk: Z, and P where they are `prepared`."""
    read: bool = True
    """Without it the forward walk only carries the state along: nothing is read with q, and y is not written."""
    fused: bool = False
    """The walk back computes every gradient."""
    only_state: bool = False
    """The walk back leaves nothing but the gradient of the first state."""
    separate: bool = False
    """dR has memory of its own; else it stands where dv will."""
    prefetch: bool = False
    """Load chunks ahead where the compiler would not; see `variants.ChunkedWalk`."""
    chunks_per_program: int = 1
    """Chunks that a program of `chunk_gradients` takes."""
    lanes: int = 0
    """Recurrent walks: lanes that share one value's part of the state."""
    warps: int = 0
    """Recurrent walks: warps of a program."""
    stages: int = 0
    """Recurrent walks: tiles of tokens in flight."""

    solve: str = "ieee"
    """How products in the triangular inverse are formed; "16-bit" stands for float16 operands."""


TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def map_options(features: Features, R: int) -> dict[str, Any]:
    """Return the options for what is done to keys, queries and gates of size R before the memory sees them."""
    how = {"map": features.map, "sum": features.sum, "logits": features.logits}
    return {"R": R, "D": features.size(R), **how}
