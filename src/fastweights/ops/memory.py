"""`fast_weight_memory`, the one function everything stands on: check the call, pick a backend, run it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastweights.common.tables import look_up
from fastweights.ops import backends
from fastweights.ops.autograd import plain, wants_gradients
from fastweights.ops.features import PLAIN, Features
from fastweights.ops.problem import Problem
from fastweights.ops.rules import Rule, update_rule
from fastweights.ops.state import FastWeightState

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fast_weight_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: str | Rule = "delta",
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    normalization: str | None = None,
    cu_seqlens: Tensor | None = None,
    state: FastWeightState | None = None,
    backend: str = "auto",
    mask: Tensor | None = None,
    starts: Tensor | None = None,
    features: Features = PLAIN,
    in_place: bool = False,
) -> tuple[Tensor, FastWeightState]:
    """Write each value under its key and read with each query, step by step: Eqs. 17-19 and 20-28 of the paper.

    Equivalent to, for `rule="delta"` (Eq. 24) and no normalisation,

        for t in range(T):
            v_bar = einsum("bhd, bhdm -> bhm", k[:, t], W)
            W = W + einsum("bhd, bhm -> bhdm", k[:, t], beta[:, t, :, None] * (v[:, t] - v_bar))
            y[:, t] = einsum("bhd, bhdm -> bhm", q[:, t], W)

    Args:
        q, k: queries and keys (B, T, H, D), already mapped by phi (and sum-normalised where wanted).
        v: values (B, T, H, M).
        rule: a name from `list_rules()`, or `update_rule(name, **options)`.
        beta, decay: gates (B, T, H), given exactly when the rule takes them; float32 is welcome beside 16-bit q, k, v.
        normalization: None, or "attention" (Eqs. 18-19, and 26-28 where the rule removes).
        cu_seqlens: bounds (N + 1,) of N sequences packed along T with B = 1, as in FlashAttention; N states.
        state: what an earlier call returned; zeros if None. Gradients flow into it.
        backend: a name from `list_backends()`; "auto" takes FASTWEIGHTS_BACKEND or else the first that can.
        mask: (B, T), False for padding: such a token changes nothing, and its output is 0.
        starts: (B, T), True where a new text begins in a row: the memory is emptied before that token. Unlike
            `cu_seqlens` it leaves the shapes as they are, and a row may begin with the rest of an older text.
        features: what q, k and the gates still have to go through. With `Features.named("dpfp", nu=3, sum=True,
            logits=True)` the call is equivalent to, and on a GPU never stores, what is here in

                q, k = sum_normalize(dpfp(q, nu=3)), sum_normalize(dpfp(k, nu=3))
                fast_weight_memory(q, k, v, beta=beta.float().sigmoid(), ...)
        in_place: the given state is not needed any more, and may be overwritten by the one that is returned.

    Returns:
        y (B, T, H, M) in the dtype of q, and the state after the last step (float32 for 16-bit inputs).
    """
    # Checks, and the choice of a backend, take longer than the smaller kernels: once for each set of shapes.
    same = _signature(q, k, v, rule, beta, decay, state, backend, features)
    simple = cu_seqlens is None and mask is None and starts is None and normalization is None
    if same is not None and simple and (again := _again.get(same)) is not None:
        y, W = again[0](q, k, v, beta, decay, None if state is None else state.W, in_place)
        return y, FastWeightState(W)
    rule = update_rule(rule)
    q, k, v = _autocast(q, k, v)
    gates = _check_inputs(rule, q, k, v, {"beta": beta, "decay": decay})
    look_up({"attention": None, "None": None}, str(normalization), "normalization")
    _check_tokens("mask", mask, q, "True for tokens that count")
    _check_tokens("starts", starts, q, "True where a new text begins")
    _check_packing(q, cu_seqlens)
    # Kernels read it as a block of memory.
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    D = features.size(q.shape[3])
    W, z = _initial_state(q, D, v, state, normalization == "attention", cu_seqlens)
    problem = Problem(rule, q, k, v, gates, W, z, cu_seqlens, mask, starts, features, in_place)
    if mask is not None and features != PLAIN:
        # Padding may hold anything, and a map of NaN has NaN for a gradient, even where none comes in.
        problem = _masked(problem, mask)
    # A gate that is still a logit cannot be held open or shut.
    problem = problem if mask is None and starts is None else problem.mapped()
    y, W, z = backends.run(problem if mask is None else _masked(problem, mask), backend)
    if same is not None and simple and (shortest := backends.again(problem, backend)) is not None:
        if len(_again) >= _MOST:
            _again.clear()
        # The rule is kept with it, so that its number is not given to another.
        _again[same] = shortest, rule
    return y.to(q.dtype), FastWeightState(W, z)


# The shortest way to run what was run before, by everything that the way depends on.
_again: dict[tuple[Any, ...], tuple[Callable[..., tuple[Tensor, Tensor]], Rule]] = {}
_MOST = 4096


def _signature(
    q: Any, k: Any, v: Any, rule: Any, beta: Any, decay: Any, state: Any, backend: str, features: Features
) -> tuple[Any, ...] | None:
    """Everything that checks and the choice of a backend depend on, of plain tensors on a GPU; None for others."""
    if not plain(q, k, v, beta, decay, getattr(state, "W", None)) or not backends.worth_it(q):
        return None
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != q.dtype:
        return None
    try:
        # What autocast makes of other dtypes is not to be remembered under these.
        if not q.dtype == k.dtype == v.dtype:
            return None
        return (
            *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype),
            *(k.device, v.device, None if beta is None else (beta.shape, beta.stride(), beta.dtype, beta.device)),
            None if decay is None else (decay.shape, decay.stride(), decay.dtype, decay.device),
            None if state is None else (state.z is None, state.W.shape, state.W.dtype, state.W.device),
            # One token is another kernel where nobody wants gradients.
            q.shape[1] == 1 and wants_gradients(q, k, v, beta, decay, None if state is None else state.W),
            *(rule if type(rule) is str else id(rule), backend, features, os.environ.get(backends.ENVIRONMENT)),
        )
    except AttributeError:
        return None


def _masked(problem: Problem, mask: Tensor) -> Problem:
    """With nothing to read or write where the mask is False."""
    q, k, v = (x.masked_fill(~mask[..., None, None], 0) for x in (problem.q, problem.k, problem.v))
    idle = {"beta": 0.0, "decay": 1.0}
    gates = {name: gate.masked_fill(~mask[..., None], idle[name]) for name, gate in problem.gates.items()}
    return replace(problem, q=q, k=k, v=v, gates=gates)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast q, k and v take its dtype, as the inputs of a matrix product do."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in floats else x for x in tensors)


def _check_inputs(rule: Rule, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The gates the rule takes, after everything was found to fit."""
    for name, x, wanted in (("q", q, "(B, T, H, D)"), ("k", k, "(B, T, H, D)"), ("v", v, "(B, T, H, M)")):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor of shape {wanted}, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; use one of {', '.join(map(str, DTYPES))}")
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must share a dtype, got q {q.dtype} and {name} {x.dtype}; cast one of them")
        _check_device(name, x, q)
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"v must have shape {_shape(*q.shape[:3], 'M')} to go with q {tuple(q.shape)}, got {tuple(v.shape)}"
        )
    if min(q.shape) == 0 or min(v.shape) == 0:
        raise ValueError(f"every size must be at least 1, got q {tuple(q.shape)} and v {tuple(v.shape)}")
    for name, gate in gates.items():
        if name in rule.gates and gate is None:
            raise ValueError(f"rule {rule.name!r} needs {name} of shape {tuple(q.shape[:3])}, got None")
        if name not in rule.gates and gate is not None:
            takes = " and ".join(rule.gates) or "no gates"
            raise ValueError(
                f"rule {rule.name!r} has no {name} (it takes {takes}), got shape {tuple(gate.shape)}; leave it out"
            )
    taken = {name: gate for name, gate in gates.items() if gate is not None}
    for name, gate in taken.items():
        if not isinstance(gate, Tensor):
            raise TypeError(f"{name} must be a tensor of shape {tuple(q.shape[:3])}, got {type(gate).__name__}")
        if gate.shape != q.shape[:3]:
            raise ValueError(f"{name} must have shape (B, T, H) = {tuple(q.shape[:3])}, got {tuple(gate.shape)}")
        if gate.dtype not in (q.dtype, torch.promote_types(q.dtype, torch.float32)):
            raise TypeError(f"{name} has dtype {gate.dtype} beside q of {q.dtype}; cast it to {q.dtype}")
        _check_device(name, gate, q)
    return taken


def _check_tokens(name: str, given: Tensor | None, q: Tensor, meaning: str) -> None:
    """One truth value a token, or nothing."""
    if given is None:
        return
    B, T = q.shape[:2]
    if not isinstance(given, Tensor) or given.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor of shape (B, T) = {(B, T)}, {meaning}")
    if given.shape != (B, T):
        raise ValueError(f"{name} must have shape (B, T) = {(B, T)}, got {tuple(given.shape)}")
    _check_device(name, given, q)


def _check_packing(q: Tensor, cu_seqlens: Tensor | None) -> None:
    B, T = q.shape[:2]
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError("cu_seqlens must be an int32 or int64 tensor [0, end of sequence 1, ..., T]")
    if B != 1 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens takes sequences packed along T with B = 1 and N + 1 bounds, got B = {B} and "
            f"cu_seqlens of shape {tuple(cu_seqlens.shape)}"
        )
    _check_device("cu_seqlens", cu_seqlens, q)
    if torch.compiler.is_compiling():
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != T or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {T}, got {bounds if len(bounds) < 20 else bounds[:19]}")


def _initial_state(
    q: Tensor, D: int, v: Tensor, state: FastWeightState | None, with_z: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """W and z to start from: checked ones of `state`, or zeros."""
    B, H, M = q.shape[0], q.shape[2], v.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    dtype = torch.promote_types(q.dtype, torch.float32)
    if state is None:
        W = torch.zeros(N, H, D, M, dtype=dtype, device=q.device)
        return W, W[..., 0].clone() if with_z else None
    if not isinstance(state, FastWeightState):
        raise TypeError(f"state must be a FastWeightState or None, got {type(state).__name__}")
    if with_z != (state.z is not None):
        has, wants = ("no z", "needs one") if with_z else ("a z", "has none")
        raise ValueError(f"state has {has} but this call {wants}; it comes from another normalization")
    for name, x, shape in (("W", state.W, (N, H, D, M)), ("z", state.z, (N, H, D))):
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(f"state.{name} must have shape {shape} here, got {tuple(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"state.{name} must be {dtype} beside {q.dtype} inputs, got {x.dtype}; use state.to(...)")
        _check_device(f"state.{name}", x, q)
    return state.W, state.z


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} but q on {q.device}; move it there with .to({str(q.device)!r})")


def _shape(*sizes: object) -> str:
    return f"({', '.join(map(str, sizes))})"
