"""Grids and arguments of the kernels.

Triton's own launcher binds and specialises some forty arguments at each call, which takes longer than the smaller
kernels run. What a compiled kernel depends on is known here, so it is looked up by that and called directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from fastweights.ops.backends.triton.backward import walk_backward
from fastweights.ops.backends.triton.configs import (
    PRECISIONS,
    Config,
    group_length,
    kept_shapes,
    operand_dtype,
    power_of_two,
)
from fastweights.ops.backends.triton.forward import invert_chunks, walk_forward
from fastweights.ops.backends.triton.gradients import chunk_gradients
from fastweights.ops.backends.triton.groups import scan_groups
from fastweights.ops.features import PLAIN, Features

Gates = tuple[Tensor | None, Tensor | None, Tensor | None]
Constants = dict[str, Any]

TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

# Compiled kernels, and the values of their compile-time arguments, by everything they depend on.
_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}


def start(
    kernel: Any,
    depends_on: tuple[Any, ...],
    grid: int,
    tensors: Sequence[Tensor | None],
    integers: tuple[int, ...],
    constants: Callable[[], Constants],
    pace: tuple[int, int],
) -> None:
    """Launch `kernel` on `grid` programs. `constants` are made when it is compiled, for `pace` = (warps, stages)."""
    pointers = [0 if x is None else x.data_ptr() for x in tensors]
    aligned = not any(pointer & 15 for pointer in pointers)
    key = (id(kernel), *depends_on)
    known = _compiled.get(key) if aligned else None
    if known is not None:
        compiled, values = known
        compiled[(grid, 1, 1)](*pointers, *integers, *values)
        return
    named = constants()
    values = tuple(named[name] for name in kernel.arg_names[len(tensors) + len(integers) :])
    result = kernel[(grid,)](*tensors, *integers, *values, num_warps=pace[0], num_stages=pace[1])
    if aligned and isinstance(result, CompiledKernel):
        _compiled[key] = result, values


def _constants(
    q: Tensor, M: int, gates: Gates, packed: bool, tied: bool, wide: torch.dtype, config: Config, features: Features
) -> Constants:
    """The compile-time arguments that all kernels take."""
    a, e, w = gates
    R = q.shape[3]
    D = features.size(R)
    precision = PRECISIONS[config.precision]
    return {
        "H": q.shape[2],
        "R": R,
        "D": D,
        "M": M,
        "C": config.chunk,
        "BLOCK_R": power_of_two(R),
        "BLOCK_D": power_of_two(D),
        "DECAY": a is not None,
        "ERASE": e is not None,
        "WRITE": w is not None,
        "TIED": tied,
        "PACKED": packed,
        "MAP": features.map,
        "SUM": bool(features.sum),
        "GATHER": bool(config.gather),
        "LOGITS": bool(features.logits),
        "OPERAND": TYPES[operand_dtype(q.dtype, wide, config)],
        "ACC": TYPES[wide],
        "PRECISION": "ieee" if precision == "16-bit" else precision,
        "SOLVE": PRECISIONS[config.solve],
    }


def _addressable(x: Tensor) -> Tensor:
    """x (B, T, H, ·) with adjacent features, batches that follow each other in time, and strides that fit 32 bits."""
    return x if x.stride(3) == 1 and _in_line(x) else x.contiguous()


def _fresh(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous memory of the shape of x; `empty_like` is the quickest way to ask for it."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[1:3])


def kind_of(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def even(gates: Gates, axis: int = 1) -> tuple[Gates, tuple[int, int]]:
    """The gates with strides that they all have, and those strides, of `axis` (tokens, or 0 for batches) and heads."""
    there = [gate for gate in gates if gate is not None]
    if not there:
        return gates, (1, 1)
    strides = there[0].stride()
    if any(gate.stride() != strides for gate in there) or (axis == 1 and not _in_line(there[0])):
        a, e, w = (None if gate is None else gate.contiguous() for gate in gates)
        H, T = there[0].shape[2], there[0].shape[1]
        return (a, e, w), (H if axis == 1 else H * T, 1)
    return gates, (strides[axis], strides[2])


def _in_line(x: Tensor) -> bool:
    """Whether tokens (B, T, H, ...) follow one another from batch to batch, by strides that fit 32 bits."""
    batch, token, head, *_ = x.stride()
    return (x.shape[0] == 1 or batch == x.shape[1] * token) and 0 <= token < 2**24 and 0 <= head < 2**31


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    W: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    tied: bool,
    keep: bool,
    config: Config,
    features: Features = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """y, the final W, and with `keep` each chunk's state and inverse, and the groups' transitions if there are any."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return forward(q, k, v, gates, W, cu_seqlens, dtype, tied, keep, config, features)
    q, k, v, W = _addressable(q), _addressable(k), _addressable(v), W.contiguous()
    length = group_length(q.shape[1], cu_seqlens, config)
    if length == 0:
        return *_forward(q, k, v, gates, W, cu_seqlens, dtype, tied, keep, config, features), None

    (B, T, H, D), shape = (*q.shape[:3], W.shape[2]), v.shape
    bounds = _bounds(B, T, length, q.device)
    q, k, v, gates = _in_a_row(q), _in_a_row(k), _in_a_row(v), _gates_in_a_row(gates)
    groups = bounds.numel() - 1
    # What each group makes of no state, and of every unit vector.
    nothing = v.new_zeros(D).expand(*q.shape[:3], D)
    unit = torch.eye(D, dtype=W.dtype, device=W.device).expand(groups, H, D, D).contiguous()
    zeros = W.new_zeros((groups, *W.shape[1:]))
    only_state = (bounds, dtype, tied, False, config, features, False)
    _, changes, _, inverses = _forward(q, k, v, gates, zeros, *only_state)
    _, transitions, _, _ = _forward(q, k, nothing, gates, unit, *only_state, inverses)
    starts = _scan(B, transitions, changes, W, back=False)
    rest = (bounds, dtype, tied, keep, config, features, True, inverses)
    y, W_end, states, inverses = _forward(q, k, v, gates, starts, *rest)
    return y.view(shape), _one_of_each(B, W_end, -1), states, inverses, transitions


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    W: Tensor,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    tied: bool,
    keep: bool,
    config: Config,
    features: Features,
    read: bool = True,
    inverses: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One walk; before it, where they are wanted and not given, the inverses."""
    (_, T, H, R), M, (N, _, D, _) = q.shape, v.shape[3], W.shape
    gates, gate_strides = even(gates)
    a, e, w = gates
    y = _fresh(v, dtype) if read else v
    W_end = torch.empty_like(W)
    kept = operand_dtype(q.dtype, W.dtype, config)
    kept_states, kept_inverses = kept_shapes((*q.shape[:3], D), M, e is not None, cu_seqlens, keep, config)
    states = torch.empty(kept_states, dtype=kept, device=q.device)
    prepared = bool(config.prepared) and e is not None
    missing = inverses is None
    if inverses is None:
        inverses = torch.empty(kept_inverses, dtype=kept, device=q.device)
    block = min(config.columns, power_of_two(M))
    strides = (*_strides(q, k, v), *gate_strides)
    kinds = (kind_of(a), kind_of(e), kind_of(w), kind_of(cu_seqlens))
    depends_on = (q.device.index, q.dtype, dtype, W.dtype, kinds, H, R, M, strides, tied, read, config, features)

    def constants() -> Constants:
        return {
            **_constants(q, M, gates, cu_seqlens is not None, tied, W.dtype, config, features),
            "BLOCK_M": block,
            "PREPARED": prepared,
            "READ": read,
        }

    tensors: Sequence[Tensor | None]
    scalars: tuple[int, ...]
    if prepared and missing:
        tensors = (k, a, e, cu_seqlens, inverses)
        blocks = {"BLOCK_D": min(config.features, power_of_two(D))}
        scalars = (N, T, *strides[2:4], *gate_strides)
        grid, pace = inverses.shape[0] * H, (config.invert_warps, 1)
        start(invert_chunks, depends_on, grid, tensors, scalars, lambda: constants() | blocks, pace)
    tensors = (q, k, v, a, e, w, W, cu_seqlens, y, W_end, states, inverses)
    scalars = (T, int(keep), *strides)
    pace = (config.forward_warps, config.forward_stages)
    start(walk_forward, depends_on, N * H * -(-M // block), tensors, scalars, constants, pace)
    return y, W_end, states, inverses


def backward(
    dy: Tensor,
    dW_end: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    states: Tensor,
    inverses: Tensor,
    transitions: Tensor | None,
    cu_seqlens: Tensor | None,
    tied: bool,
    wide: torch.dtype,
    config: Config,
    features: Features = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, Gates, Tensor]:
    """Gradients of q, k, v, the gates and the initial W."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            rest = (states, inverses, transitions, cu_seqlens, tied, wide, config, features)
            return backward(dy, dW_end, q, k, v, gates, *rest)
    q, k, v, dy = _addressable(q), _addressable(k), _addressable(v), _addressable(dy)
    kept = (states, inverses)
    length = group_length(q.shape[1], cu_seqlens, config)
    if length == 0:
        return _backward(dy, dW_end, q, k, v, gates, *kept, cu_seqlens, tied, wide, config, features)

    assert transitions is not None
    (B, T, _, _), sizes = q.shape, (q.shape, k.shape, v.shape)
    bounds = _bounds(B, T, length, q.device)
    inputs = (_in_a_row(q), _in_a_row(k), _in_a_row(v), _gates_in_a_row(gates))
    dy = _in_a_row(dy)
    # What each group makes of no gradient, then the gradients between groups, then everything.
    *_, changes = _backward(dy, None, *inputs, *kept, bounds, tied, wide, config, features, only_state=True)
    ends = _scan(B, transitions, changes, dW_end, back=True)
    dq, dk, dv, grads, dW = _backward(dy, ends, *inputs, *kept, bounds, tied, wide, config, features)
    dq, dk, dv = (x.view(size) for x, size in zip((dq, dk, dv), sizes, strict=True))
    da, de, dw = (None if grad is None else grad.view(B, T, -1) for grad in grads)
    return dq, dk, dv, (da, de, dw), _one_of_each(B, dW, 0)


def _bounds(B: int, T: int, length: int, device: torch.device) -> Tensor:
    """Where groups of `length` tokens begin and end, with all sequences in a row."""
    groups = -(-T // length)
    n = torch.arange(B * groups + 1, device=device, dtype=torch.int32)
    return n // groups * T + n % groups * length


def _one_of_each(B: int, states: Tensor, group: int) -> Tensor:
    """The states of one group of each sequence."""
    return states.unflatten(0, (B, -1))[:, group].clone(memory_format=torch.contiguous_format)


def _in_a_row(x: Tensor) -> Tensor:
    return x.flatten(0, 1).unsqueeze(0)


def _gates_in_a_row(gates: Gates) -> Gates:
    a, e, w = (None if gate is None else _in_a_row(gate) for gate in gates)
    return a, e, w


def _scan(B: int, transitions: Tensor, changes: Tensor, initial: Tensor | None, back: bool) -> Tensor:
    """The state before each group, or with `back` the gradient of the state after it."""
    groups, H, D, M = changes.shape
    states = torch.empty_like(changes)
    block = min(16, power_of_two(M))
    begin = changes if initial is None else initial.contiguous()

    def constants() -> Constants:
        precision = "ieee" if changes.dtype == torch.float64 else "tf32x3"
        sizes = {"BLOCK_D": power_of_two(D), "BLOCK_M": block, "BACK": back, "PRECISION": precision}
        return {"H": H, "D": D, "M": M, **sizes}

    depends_on = (changes.device.index, changes.dtype, H, D, M, back)
    tensors = (transitions, changes, begin, states)
    scalars = (groups // B, int(initial is not None))
    start(scan_groups, depends_on, B * H * -(-M // block), tensors, scalars, constants, (4, 1))
    return states


def _backward(
    dy: Tensor,
    dW_end: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    states: Tensor,
    inverses: Tensor,
    cu_seqlens: Tensor | None,
    tied: bool,
    wide: torch.dtype,
    config: Config,
    features: Features,
    only_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Gates, Tensor]:
    """One walk back, and unless it is `only_state` that counts, the gradients inside chunks."""
    (B, T, H, R), M = q.shape, v.shape[3]
    N, D = B if cu_seqlens is None else cu_seqlens.numel() - 1, features.size(R)
    gates, gate_strides = even(gates)
    a, e, w = gates
    dq, dk, dv = _fresh(q), _fresh(k), _fresh(v)
    da, de, dw = (None if gate is None else _fresh(gate) for gate in gates)
    dW = torch.empty((N, H, D, M), dtype=wide, device=q.device)
    final = dW if dW_end is None else dW_end.contiguous()
    fused = bool(config.fused) and not only_state
    # The second launch reads the right side's gradient as an operand. dv will do where it is that, unrounded further.
    separate = not fused and (tied or w is not None or states.dtype != v.dtype)
    dright = _fresh(v, states.dtype) if separate else dv
    dstates = states if fused else torch.empty_like(states)
    block = power_of_two(M) if fused else min(config.columns, power_of_two(M))
    strides = (*_strides(q, k, v, dy), *gate_strides)
    kinds = (kind_of(a), kind_of(e), kind_of(w), kind_of(cu_seqlens))
    depends_on = (q.device.index, q.dtype, dy.dtype, wide, kinds, H, R, M, strides, tied, only_state, config, features)
    inputs = (q, k, v, a, e, w, cu_seqlens, states, inverses, dy)

    def constants() -> Constants:
        return {
            **_constants(q, M, gates, cu_seqlens is not None, tied, wide, config, features),
            "BLOCK_M": block,
            "FUSED": fused,
            "RIGHT": separate,
        }

    tensors: Sequence[Tensor | None] = (*inputs, final, dq, dk, dv, da, de, dw, dW, dstates, dright)
    scalars = (T, int(dW_end is not None), *strides)
    pace = (config.backward_warps, config.backward_stages)
    start(walk_backward, depends_on, N * H * -(-M // block), tensors, scalars, constants, pace)
    if not fused and not only_state:
        tensors = (*inputs, dq, dk, da, de, dw, dstates, dright)
        blocks = {"BLOCK_D": min(config.features, power_of_two(D)), "BLOCK_M": power_of_two(M)}
        grid, pace = states.shape[0] * H, (config.chunk_warps, 1)
        start(chunk_gradients, depends_on, grid, tensors, (N, T, *strides), lambda: constants() | blocks, pace)
    return dq, dk, dv, (da, de, dw), dW
