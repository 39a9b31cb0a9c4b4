# mypy: disable-error-code="no-untyped-def"
"""The states between groups of chunks, from what each group does to a state; see docs/kernels.md."""

import triton
import triton.language as tl

from fastweights.ops.gpu.memory.kernels.tiles import product


@triton.jit(do_not_specialize=["G", "given"])
def scan_groups(
    transitions,  # (B G, H, D, D), F of each group
    changes,  # (B G, H, D, M), what each group makes of no state
    start,  # (B, H, D, M)
    states,  # (B G, H, D, M), before each group
    G,
    given,
    BACK: tl.constexpr,
    o: tl.constexpr,
):
    """The states before the groups of a sequence, for one head and some columns.

        state = start                                           # zero where it is not `given`
        for g in range(G):
            states[g] = state
            state = transitions[g] @ state + changes[g]

    With `BACK` from the last group to the first, by the transposed transitions: gradients of the states that groups
    leave.
    """
    PRECISION: tl.constexpr = o.precision
    splits: tl.constexpr = (o.M + o.block_M - 1) // o.block_M
    program = tl.program_id(0)
    head = (program // splits) % o.H
    n = (program // (splits * o.H)).to(tl.int64)
    m = (program % splits) * o.block_M + tl.arange(0, o.block_M)
    d = tl.arange(0, o.block_D)
    # Value-major, as in the walks: the state is the left operand of every product it enters.
    inside = (m[:, None] < o.M) & (d[None, :] < o.D)
    at = d[None, :] * o.M + m[:, None]
    square = (d[:, None] < o.D) & (d[None, :] < o.D)
    turned = d[:, None] * o.D + d[None, :] if BACK else d[None, :] * o.D + d[:, None]
    state = tl.load(start + (n * o.H + head) * o.D * o.M + at, inside & (given != 0), 0.0)
    for i in range(G):
        g = G - 1 - i if BACK else i
        group = (n * G + g) * o.H + head
        tl.store(states + group * o.D * o.M + at, state, inside)
        F_t = tl.load(transitions + group * o.D * o.D + turned, square, 0.0)
        change = tl.load(changes + group * o.D * o.M + at, inside, 0.0)
        state = change + product(state, F_t, state.dtype, PRECISION)
