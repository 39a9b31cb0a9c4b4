# mypy: disable-error-code="no-untyped-def"
"""The states between groups of chunks, from what each group does to a state; see docs/kernels.md."""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.tiles import dot


@triton.jit(do_not_specialize=["G", "given"])
def scan_groups(
    transitions,
    changes,
    start,
    states,
    G,
    given,
    H: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BACK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """states[0] = start, states[g + 1] = transitions[g] @ states[g] + changes[g], for one head and some columns.

    With `BACK` from the last group to the first, by the transposed transitions: gradients of the states that groups
    leave. A start that is not `given` is zero.
    """
    splits: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    head = (program // splits) % H
    n = (program // (splits * H)).to(tl.int64)
    m = (program % splits) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    # Value-major, as in the walks: the state is the left operand of every product it enters.
    inside = (m[:, None] < M) & (d[None, :] < D)
    at = d[None, :] * M + m[:, None]
    square = (d[:, None] < D) & (d[None, :] < D)
    turned = d[:, None] * D + d[None, :] if BACK else d[None, :] * D + d[:, None]
    state = tl.load(start + (n * H + head) * D * M + at, inside & (given != 0), 0.0)
    for i in range(G):
        g = G - 1 - i if BACK else i
        group = (n * G + g) * H + head
        tl.store(states + group * D * M + at, state, inside)
        F_t = tl.load(transitions + group * D * D + turned, square, 0.0)
        change = tl.load(changes + group * D * M + at, inside, 0.0)
        state = change + dot(state, F_t, state.dtype, PRECISION)
