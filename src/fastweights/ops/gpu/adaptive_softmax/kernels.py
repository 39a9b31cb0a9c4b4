# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the adaptive softmax: no logits in memory, no word from the host.

N tokens sorted by target, so that those of a cluster stand together; S softmaxes, the head's first. All their weights
are the rows of one matrix, the head's words, then the clusters' vectors, then all other words: each softmax is a range
of tokens and a range of rows. How many tokens a cluster has is known on the device alone.

A softmax over few tokens and many rows is split into parts of its rows, which `join_parts` puts together. A slot is a
tile of tokens beside one such part. Logits are in base 2, where the hardware has its exponential.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Parts that `join_parts` takes at a time.
CHUNK = tl.constexpr(8)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a kernel is compiled for, `o` in the code: sizes, and how it splits the work (`variants.Config`)."""

    S: int
    D: int
    block_D: int
    tile: int
    step: int = 0
    parts: int = 0
    least: int = 0
    keep: bool = False
    acc: tl.dtype = tl.float32
    precision: str = "ieee"


@triton.jit
def load_rows(x, first, stop, COUNT: tl.constexpr, o: tl.constexpr):
    """Load COUNT rows of a (·, D) matrix, zero from row `stop` on. What differs from call to call is one address."""
    rows = tl.arange(0, COUNT)[:, None]
    columns = tl.arange(0, o.block_D)[None, :]
    there = rows < stop - first
    if o.block_D != o.D:
        there &= columns < o.D
    return tl.load(x + first * o.D + (rows * o.D + columns), there, 0.0)


@triton.jit
def tokens_of(s, N, starts):
    """Return the first token of softmax s, and the end: the head has all, a cluster those whose target it holds."""
    first = tl.zeros((), tl.int32)
    stop = first + N
    if s > 0:
        first = tl.load(starts + s - 1).to(tl.int32)
        stop = tl.load(starts + s).to(tl.int32)
    return first, stop


@triton.jit
def parts_of(s, N, starts, rows, o: tl.constexpr):
    """Return how many tiles of tokens and parts of rows softmax s has, and how many rows a part has."""
    first, stop = tokens_of(s, N, starts)
    size = tl.load(rows + s + 1) - tl.load(rows + s)
    tiles = tl.cdiv(stop - first, o.tile)
    wanted = tl.minimum(tl.maximum(o.parts // tl.maximum(tiles, 1), 1), tl.cdiv(size, o.least))
    width = tl.cdiv(tl.cdiv(size, wanted), o.step) * o.step
    return tiles, tl.cdiv(size, width), width


@triton.jit
def sort_tokens(
    hidden,  # (N, D)
    order,  # (N,) tokens by rising target
    words,  # (N,) their targets
    cutoffs,  # (S,) where the clusters begin, and V
    sorted_hidden,  # (N, D)
    entries,  # (2, N) the target's row in the head, and in its cluster
    N,
    o: tl.constexpr,
):
    """Bring the tokens into the order of their targets and find the rows of those.

    sorted_hidden = hidden[order]
    cluster = torch.bucketize(words, cutoffs[:-1], right=True)
    entries[0] = torch.where(cluster == 0, words, cutoffs[0] + cluster - 1)
    entries[1] = words + S - 1
    """
    rows = tl.program_id(0) * o.tile + tl.arange(0, o.tile)
    here = rows < N
    source = tl.load(order + rows, here, 0)
    word = tl.load(words + rows, here, 0).to(tl.int32)
    columns = tl.arange(0, o.block_D)
    there = here[:, None] & (columns[None, :] < o.D)
    tile = tl.load(hidden + source[:, None] * o.D + columns[None, :], there, 0.0)
    tl.store(sorted_hidden + rows[:, None].to(tl.int64) * o.D + columns[None, :], tile, there)
    head = tl.load(cutoffs).to(tl.int32)
    last = tl.load(cutoffs + o.S - 1).to(tl.int32) - 1
    # What is no word stays inside the matrix; `join_parts` makes its loss NaN.
    word = tl.minimum(tl.maximum(word, 0), last)
    entry = word
    S: tl.constexpr = o.S
    for s in tl.static_range(1, S):
        entry = tl.where(word >= tl.load(cutoffs + s - 1), head + s - 1, entry)
    tl.store(entries + rows, entry, here)
    tl.store(entries + N + rows, word + (o.S - 1), here)


@triton.jit
def partial_softmax(
    x,  # (N, D) sorted
    weight,  # (V + S - 1, D)
    bias,  # (V + S - 1,)
    starts,  # (S,) first token of each cluster, and the first that has no word
    rows,  # (S + 1,) first row of each softmax, and the end
    totals,  # (slots, tile) log-sum-exps, in base 2
    means,  # (slots, tile, D) the rows, averaged by their probability
    N,
    o: tl.constexpr,
):
    """Compute a tile of tokens x against a part (weight, bias) of the rows of its softmax: one slot of the results.

    logits = (x @ weight.T + bias) * log2(e)
    totals[slot] = (2**logits).sum(1).log2()
    means[slot] = softmax(logits * ln(2), 1) @ weight              # with o.keep
    """
    slot = tl.program_id(0)
    s = tl.zeros((), tl.int32)
    left = slot
    tiles, parts, width = parts_of(s, N, starts, rows, o)
    while (s < o.S - 1) & (left >= tiles * parts):
        left -= tiles * parts
        s += 1
        tiles, parts, width = parts_of(s, N, starts, rows, o)
    if left < tiles * parts:
        first, stop = tokens_of(s, N, starts)
        begin = tl.load(rows + s) + left % parts * width
        end = tl.minimum(begin + width, tl.load(rows + s + 1))
        inside = tl.arange(0, o.tile)
        tile = load_rows(x, first + left // parts * o.tile, stop, o.tile, o)
        top = tl.full((o.tile,), float("-inf"), o.acc)
        total = tl.full((o.tile,), 0.0, o.acc)
        mean = tl.full((o.tile, o.block_D), 0.0, o.acc)
        for row in range(begin, end, o.step):
            words = row + tl.arange(0, o.step)
            w = load_rows(weight, row, end, o.step, o)
            b = tl.load(bias + words, words < end, float("-inf")).to(o.acc) * LOG2E
            logits = tl.dot(tile, tl.trans(w), input_precision=o.precision) * LOG2E + b[None, :]
            higher = tl.maximum(top, tl.max(logits, 1))
            p = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, 1)
            if o.keep:
                mean = mean * shrink[:, None] + tl.dot(p.to(w.dtype), w, input_precision=o.precision)
            top = higher
        at = slot.to(tl.int64) * o.tile + inside
        tl.store(totals + at, top + tl.log2(total))
        if o.keep:
            columns = tl.arange(0, o.block_D)
            mean = mean / total[:, None]
            tl.store(
                means + slot.to(tl.int64) * o.tile * o.D + (inside[:, None] * o.D + columns[None, :]),
                mean.to(means.dtype.element_ty),
                columns[None, :] < o.D,
            )


@triton.jit
def join_parts(
    x,  # (N, D) sorted
    weight,  # (V + S - 1, D)
    bias,  # (V + S - 1,)
    order,  # (N,) tokens by rising target
    words,  # (N,) their targets
    entries,  # (2, N) the target's row in the head, and in its cluster
    starts,  # (S,) first token of each cluster, and the first that has no word
    rows,  # (S + 1,) first row of each softmax, and the end
    partial_totals,  # (slots, tile) log-sum-exps, in base 2
    partial_means,  # (slots, tile, D) the rows, averaged by their probability
    nll,  # (N,) in the order of the caller
    slope,  # (N, D) gradient of the nll by the hidden vector, in the order of the caller
    totals,  # (2, N) log-sum-exps of head and cluster in base 2, sorted
    N,
    V,
    o: tl.constexpr,
):
    """Put the parts of one token together, in the head and, for a rarer word, in its cluster.

    total = (2**partial_totals).sum().log2()
    mean = (2 ** (partial_totals - total)) @ partial_means
    nll += total * ln(2) - (weight[entry] @ x + bias[entry])
    slope += mean - weight[entry]
    """
    token = tl.program_id(0)
    columns = tl.arange(0, o.block_D)
    inside = columns < o.D
    own = tl.load(x + token.to(tl.int64) * o.D + columns, inside, 0.0).to(o.acc)
    loss = tl.zeros((), o.acc)
    gradient = tl.full((o.block_D,), 0.0, o.acc)
    base = tl.zeros((), tl.int32)
    for s in range(o.S):
        first, stop = tokens_of(s, N, starts)
        tiles, parts, _ = parts_of(s, N, starts, rows, o)
        if (token >= first) & (token < stop):
            slot = base + (token - first) // o.tile * parts
            top = tl.full((), float("-inf"), o.acc)
            total = tl.zeros((), o.acc)
            mean = tl.full((o.block_D,), 0.0, o.acc)
            for start in range(0, parts, CHUNK):
                part = start + tl.arange(0, CHUNK)
                at = (slot + part).to(tl.int64) * o.tile + (token - first) % o.tile
                logarithm = tl.load(partial_totals + at, part < parts, float("-inf"))
                higher = tl.maximum(top, tl.max(logarithm, 0))
                share = tl.exp2(logarithm - higher)
                shrink = tl.exp2(top - higher)
                total = total * shrink + tl.sum(share, 0)
                if o.keep:
                    there = (part < parts)[:, None] & inside[None, :]
                    some = tl.load(partial_means + at[:, None] * o.D + columns[None, :], there, 0.0).to(o.acc)
                    mean = mean * shrink + tl.sum(share[:, None] * some, 0)
                top = higher
            top += tl.log2(total)
            level = tl.minimum(s, 1)
            tl.store(totals + level * N + token, top)
            entry = tl.load(entries + level * N + token)
            w = tl.load(weight + entry.to(tl.int64) * o.D + columns, inside, 0.0).to(o.acc)
            loss += top * LN2 - tl.sum(own * w, 0) - tl.load(bias + entry).to(o.acc)
            gradient += mean / total - w
        base += tiles * parts
    word = tl.load(words + token)
    loss = tl.where((word >= 0) & (word < V), loss, float("nan"))
    to = tl.load(order + token).to(tl.int64)
    tl.store(nll + to, loss)
    if o.keep:
        tl.store(slope + to * o.D + columns, gradient.to(slope.dtype.element_ty), inside)


@triton.jit
def weight_gradient(
    x,  # (N, D) sorted
    weight,  # (V + S - 1, D)
    bias,  # (V + S - 1,)
    entries,  # (2, N) the target's row in the head, and in its cluster
    starts,  # (S,) first token of each cluster, and the first that has no word
    rows,  # (S + 1,) first row of each softmax, and the end
    totals,  # (2, N) log-sum-exps of head and cluster in base 2
    grad,  # (N,) sorted
    d_head,  # (parts, rows of the head, D) one for each part of the tokens
    d_head_bias,  # (parts, rows of the head)
    d_weight,  # (V, D), of which the head's words are left out
    d_bias,  # (V,)
    N,
    o: tl.constexpr,
):
    """Compute the gradient of `tile` rows of one softmax from its tokens x, `step` at a time.

    p = 2 ** ((weight @ x.T + bias[:, None]) * log2(e) - totals)
    d = (p - (own[:, None] == entries)) * grad                     # own: the numbers of these rows
    d_weight, d_bias = d @ x, d.sum(1)

    The head has few rows and all the tokens, so that these are split into parts; the clusters come after it.
    """
    program = tl.program_id(0)
    begin = tl.load(rows)
    end = tl.load(rows + 1)
    size = end
    s = tl.zeros((), tl.int32)
    tile = program // o.parts
    part = program % o.parts
    if tile >= tl.cdiv(size, o.tile):
        tile = program - tl.cdiv(size, o.tile) * o.parts
        s += 1
        begin = end
        end = tl.load(rows + 2)
        while tile >= tl.cdiv(end - begin, o.tile):
            tile -= tl.cdiv(end - begin, o.tile)
            s += 1
            begin = end
            end = tl.load(rows + s + 1)
    first, stop = tokens_of(s, N, starts)
    if s == 0:
        share = tl.cdiv(tl.cdiv(N, o.parts), o.step) * o.step
        first = part * share
        stop = tl.minimum(first + share, N)
    level = tl.minimum(s, 1) * N
    begin += tile * o.tile
    own = begin + tl.arange(0, o.tile)
    w = load_rows(weight, begin, end, o.tile, o)
    b = tl.load(bias + own, own < end, float("-inf")).to(o.acc) * LOG2E
    d_w = tl.full((o.tile, o.block_D), 0.0, o.acc)
    d_b = tl.full((o.tile,), 0.0, o.acc)
    for start in range(first, stop, o.step):
        tokens = start + tl.arange(0, o.step)
        here = tokens < stop
        t = load_rows(x, start, stop, o.step, o)
        total = tl.load(totals + level + tokens, here, float("inf"))
        entry = tl.load(entries + level + tokens, here, -1)
        g = tl.load(grad + tokens, here, 0.0).to(o.acc)
        p = tl.exp2(tl.dot(w, tl.trans(t), input_precision=o.precision) * LOG2E + (b[:, None] - total[None, :]))
        p = tl.where(own[:, None] == entry[None, :], p - 1.0, p) * g[None, :]
        d_b += tl.sum(p, 1)
        d_w += tl.dot(p.to(t.dtype), t, input_precision=o.precision)
    columns = tl.arange(0, o.block_D)
    mine = (own < end)[:, None] & (columns[None, :] < o.D)
    if s == 0:
        to = part * size + own
        tl.store(d_head + to[:, None] * o.D + columns[None, :], d_w, mine)
        tl.store(d_head_bias + to, d_b, own < end)
    else:
        # Behind the clusters' vectors, words have moved by as many rows.
        to = own - (o.S - 1)
        tl.store(d_weight + to[:, None] * o.D + columns[None, :], d_w.to(d_weight.dtype.element_ty), mine)
        tl.store(d_bias + to, d_b.to(d_bias.dtype.element_ty), own < end)
