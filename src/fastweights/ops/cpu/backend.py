"""Backend `cpu`: the family's recurrence in C++, csrc/memory.cpp, which `build` builds when first needed.

The C++ knows PyTorch by its stable C interface only, from which it takes its threads; tensors travel as addresses and
strides.
"""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import family
from fastweights.ops.causality import Tokens
from fastweights.ops.cpu import step
from fastweights.ops.cpu.build import failure, library, unavailable
from fastweights.ops.cpu.views import View, rows
from fastweights.ops.features import PLAIN
from fastweights.ops.operator import ChunkedOperator, number_of_chunks
from fastweights.ops.spec import Backend, Executable, Refusal, Spec, checked_bounds, prepare_mapped

NO_MEMORY, FINITE = 0, 1
# What the C++ writes for the tokens of sequences; after the last sequence it is 0.
WRITTEN = ("y", "dq", "dk", "dv", "da", "de", "dw")
# States of more numbers are multiplied in bfloat16, where inputs are and the processor can.
NARROW_FROM = 32 * 32


def chunk_length(D: int, M: int) -> int:
    """Tokens in a chunk: the more, the fewer states are kept, and the more work products within a chunk are."""
    return 32 if max(D, M) <= 64 else 48


def kept_dtype(q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, W: Tensor) -> torch.dtype:
    """Return the dtype of the states before chunks: bfloat16 where the C++ shall multiply in it, see csrc/pairs.h."""
    narrow = W.dtype == torch.float32 and q.dtype == k.dtype == v.dtype == torch.bfloat16
    per_key = a is not None and a.dim() == 4
    large = W.shape[-2] * W.shape[-1] > NARROW_FROM
    return torch.bfloat16 if narrow and large and not per_key and library().fastweights_pairs() else W.dtype


class Call(ctypes.Structure):
    """One call to the C++: sizes, the bounds of the sequences in time, and tensors by name."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("N", "H", "D", "M", "C", "packed", "group", "per_key", "log", "pairs")),
        ("bounds", ctypes.POINTER(ctypes.c_int64)),
        *((name, View) for name in ("q", "k", "v", "a", "e", "w", "y", "dy", "dq", "dk", "dv", "da", "de", "dw")),
        *((name, ctypes.c_void_p) for name in ("W", "W_end", "before", "dW_end", "dW_start", "after")),
    )


def _call(
    name: str, chunk: int, log: bool, cu_seqlens: Tensor | None, views: dict[str, Tensor | None], **states: Any
) -> bool:
    """Run `name` of the library, and say whether y, or the gradients of q and k, are finite.

    The tensors are alive until it returns, because the caller holds them.
    """
    q, k, v, a = (views[name] for name in "qkva")
    state = states.get("W", states.get("dW_start"))
    assert q is not None and k is not None and v is not None and state is not None
    (B, T, heads, D), (H, M) = q.shape, v.shape[2:]
    per_key = a is not None and a.dim() == 4
    bounds = [T * i for i in range(B + 1)] if cu_seqlens is None else checked_bounds(cu_seqlens, T)
    N, wide, kept = len(bounds) - 1, state.dtype, kept_dtype(q, k, v, a, state)
    sizes = (N, H, D, M, chunk, cu_seqlens is not None, H // heads, per_key, log, kept != wide)
    call = Call(*sizes, (ctypes.c_int64 * len(bounds))(*bounds))
    # The C++ believes what it is told, so everything it will read or write through is checked here.
    if wide not in (torch.float32, torch.float64):
        raise TypeError(f"the state must be float32 or float64, got {wide}")
    if H % heads:
        raise ValueError(f"the heads of v must be a multiple of those of q, got {H} and {heads}")
    # By the last letter of a tensor's name, which is that of its gradient's, too.
    keyed, valued = (heads, D), (H, M)
    shapes = {"q": keyed, "k": keyed, "v": valued, "y": valued, "a": (H, D) if per_key else (H,), "e": (H,), "w": (H,)}
    for key, x in views.items():
        if x is None:
            continue
        wanted = (B, T, *shapes[key[-1]])
        if x.shape != wanted:
            raise ValueError(f"{key} must have shape {wanted} beside q {tuple(q.shape)}, got {tuple(x.shape)}")
        setattr(call, key, View.of(x))
        if key in WRITTEN and bounds[-1] < T and cu_seqlens is not None:
            x[:, bounds[-1] :] = 0
    for key, x in states.items():
        if x is None:
            continue
        dtype = kept if key == "before" else wide
        if x.shape[1:] != (H, D, M) or (key.startswith(("W", "dW")) and x.shape[0] != N) or x.dtype != dtype:
            raise ValueError(f"{key} must be {dtype} of shape {(N, H, D, M)}, got {x.dtype} {tuple(x.shape)}")
        setattr(call, key, x.data_ptr())
    outcome = library()[name](ctypes.byref(call), int(wide == torch.float64))
    if outcome == NO_MEMORY:
        raise MemoryError(f"no memory for chunks of {chunk} steps at D = {D}, M = {M}")
    return bool(outcome == FINITE)


def _chunk_starts(q: Tensor, cu_seqlens: Tensor | None, chunk: int) -> list[tuple[int, int]]:
    """Return row and time of the first token of each chunk, in the order of `before`."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return [(row, t) for row in range(B) for t in range(0, T, chunk)]
    return [(0, t) for start, end in pairwise(cu_seqlens.tolist()) for t in range(start, end, chunk)]


def forward(
    tokens: Tokens, W: Tensor, cu_seqlens: Tensor | None, log: bool, dtype: torch.dtype, keep: bool, chunk: int
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return y in `dtype`, the final W, with `keep` the state before each chunk, and whether y is finite."""
    q, k, v, a, e, w = tokens
    q, k, v, a, W = rows(q), rows(k), rows(v), rows(a), W.contiguous()
    y, W_end = v.new_empty(v.shape, dtype=dtype), W.new_empty(W.shape)
    count = number_of_chunks(q, chunk, cu_seqlens) if keep else 0
    before = W.new_empty((count, *W.shape[1:]), dtype=kept_dtype(q, k, v, a, W))
    if cu_seqlens is not None:
        used = (cu_seqlens.diff() + chunk - 1).div(chunk, rounding_mode="floor").sum()
        before[int(used) :] = 0
    views = {"q": q, "k": k, "v": v, "a": a, "e": e, "w": w, "y": y}
    finite = _call("fastweights_forward", chunk, log, cu_seqlens, views, W=W, W_end=W_end, before=before)
    return y, W_end, before, finite


def backward(
    dy: Tensor, dW: Tensor | None, tokens: Tokens, before: Tensor, cu_seqlens: Tensor | None, log: bool, chunk: int
) -> tuple[list[Tensor], bool]:
    """Return the gradients of q, k, v, the coefficients there are and W, and whether those of q and k are finite."""
    q, k, v, a, e, w = tokens
    dy, q, k, v, a = (rows(x) for x in (dy, q, k, v, a))
    wide = torch.float32 if before.dtype == torch.bfloat16 else before.dtype
    dW = None if dW is None else dW.to(wide).contiguous()
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    dW_start = before.new_empty((N, *before.shape[1:]), dtype=wide)
    # With fewer heads than threads the gradients of all states come first; then every chunk is on its own.
    few = N * q.shape[2] < torch.get_num_threads() and before.shape[0] > N
    views = {"dy": dy, "q": q, "k": k, "v": v, "a": a, "e": e, "w": w}
    named = [(name, views[name]) for name in ("q", "k", "v", "a", "e", "w")]
    # Sums over a group's heads are kept as wide as the state.
    summed = {"q": wide, "k": wide} if v.shape[2] > q.shape[2] else {}
    grads = {f"d{name}": x.new_empty(x.shape, dtype=summed.get(name)) for name, x in named if x is not None}
    after = torch.empty_like(before, dtype=wide) if few else None
    states = {"before": before, "dW_end": dW, "dW_start": dW_start, "after": after}
    finite = _call("fastweights_backward", chunk, log, cu_seqlens, {**views, **grads}, **states)
    return [*(grads[f"d{name}"].to(x.dtype) for name, x in named if x is not None), dW_start], finite


OPERATOR = ChunkedOperator("cpu", forward, backward, _chunk_starts, chunk_length, "cpu", kept_dtype)
recurrence = OPERATOR.recurrence


def prepare(spec: Spec) -> Executable | Refusal:
    """Answer with the recurrence in C++ for rules of the family and tensors on the CPU."""
    reason = family.outside(spec.rule)
    if reason is None and spec.device.type != "cpu":
        reason = f"it runs on the CPU, the tensors are on {spec.device}"
    reason = reason or failure()
    if reason:
        return Refusal(reason)
    if step.takes(spec):
        return step.prepare(spec)
    if spec.features != PLAIN:
        return prepare_mapped(prepare, spec)
    log = family.in_logarithms(spec)
    return family.executable(spec, partial(recurrence, eager=spec.eager, log=log), logs=log)


BACKEND = Backend(
    name="cpu",
    description="C++ in chunks of time, one token by itself: linear rules, on the CPU, O(T/C) states kept",
    prepare=prepare,
    unavailable=unavailable,
    single_tokens=step.takes,
)
