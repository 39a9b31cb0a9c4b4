"""`fast_weight_memory`, the one function everything stands on: describe the call, look up what runs it, run it."""

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastweights.common.tables import check_name
from fastweights.ops import backends
from fastweights.ops.features import PLAIN, Features, MapFeatures
from fastweights.ops.normalization import divides
from fastweights.ops.product import on_single_writes, one_write_per_step, writes_per_token
from fastweights.ops.rules import RULES, Rule, update_rule
from fastweights.ops.spec import Executable, Inputs, Spec, checked_bounds
from fastweights.ops.state import FastWeightState

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

MOST_EXECUTABLES = 4096

CHECK_BOUNDS = "FASTWEIGHTS_CHECK_BOUNDS"


def fast_weight_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rule: str | Rule = "delta",
    normalization: str | None = None,
    cu_seqlens: Tensor | None = None,
    state: FastWeightState | None = None,
    backend: str = "auto",
    mask: Tensor | None = None,
    starts: Tensor | None = None,
    features: Features | MapFeatures = PLAIN,
    in_place: bool = False,
    **gates: Tensor | None,
) -> tuple[Tensor, FastWeightState]:
    """Write each value under its key and read with each query, step by step: Eqs. 17-19 and 20-28 of the paper.

    Equivalent to, for `rule="delta"` (Eq. 24) and no normalisation,

        for t in range(T):
            v_bar = einsum("bhd, bhdm -> bhm", k[:, t], W)
            W = W + einsum("bhd, bhm -> bhdm", k[:, t], beta[:, t, :, None] * (v[:, t] - v_bar))
            y[:, t] = einsum("bhd, bhdm -> bhm", q[:, t], W)

    Args:
        q: queries (B, T, H, D), already mapped by phi (and sum-normalised where wanted).
        k: keys (B, T, H, D), likewise.
        v: values (B, T, H, M), or of n times as many heads, as gates and state then have: every n of them share a head
            of q and k.
        rule: a name from `list_rules()`, or `update_rule(name, **options)`.
        normalization: None, or "attention" (Eqs. 18-19, and 26-28 where the rule removes).
        cu_seqlens: bounds (N + 1,) of N sequences packed along T with B = 1, as in FlashAttention; N states. They may
            end before T: y is 0 after the last one. GPU kernels read them on the device, so that a call can be captured
            in a CUDA graph and replayed with others.
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
        **gates: the rule's gates, such as `beta` and `decay`, of shape (B, T, H) each; float32 is welcome beside
            16-bit q, k and v. A `decay` may also be one per key channel, (B, T, H, D), and `log_decay`, its natural
            logarithm, may stand in its place: near 0 it keeps digits that a decay next to 1 has no room for.
            `rule="gated_delta"` is then Kimi Delta Attention and `rule="decay"` is gated linear attention. With `beta`
            up to 2, and keys of length 1, the delta rule does not just remove what is stored under a key but can turn
            its sign: 1 - beta is an eigenvalue of what multiplies the memory.

    k and v, and with them the gates that do not fade, may have n times the tokens of q: the memory then fades once a
    token, is written n times and read once (DeltaProduct).

    `torch.func` (vmap, grad, jvp, ...) and forward-mode differentiation work with every rule; they go through the
    backend `reference`, whichever is asked for.

    What is NaN or infinite at one token changes nothing before it, in other rows and heads, past a `starts` or through
    a `mask`. GPU kernels keep that to a chunk of up to 64 tokens: there earlier tokens of the same chunk may turn NaN.

    Returns:
        y (B, T, H, M) in the dtype of q, and the state after the last step (float32 for 16-bit inputs).
    """
    rule, name = update_rule(rule), backends.requested(backend)
    if not (state is None or isinstance(state, FastWeightState)):
        raise TypeError(f"state must be a FastWeightState or None, got {type(state).__name__}")
    if torch._C._is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    present = {gate: x for gate, x in gates.items() if x is not None}
    W, z = (None, None) if state is None else (state.W, state.z)
    inputs = Inputs(rule, q, k, v, present, W, z, cu_seqlens, mask, starts, features, in_place, divides(normalization))
    try:
        spec = Spec.of(inputs)
    except (AttributeError, IndexError):
        # Something is not a tensor, or has too few dimensions, and the checks say what.
        check(inputs)
        raise
    # Checks and the choice of kernels take longer than the smaller kernels: once for each spec.
    run = backends.EXECUTABLES.get((spec, name)) if spec.eager else None
    if run is None:
        run = _prepare(inputs, spec, name)
        if spec.eager:
            if len(backends.EXECUTABLES) >= MOST_EXECUTABLES:
                backends.EXECUTABLES.clear()
            backends.EXECUTABLES[spec, name] = run
    if cu_seqlens is not None:
        end = _checked_end(cu_seqlens, q.shape[1])
        if end < q.shape[1]:
            run = partial(_run_until, end, name)
        # Kernels read it as a block of memory.
        inputs.cu_seqlens = cu_seqlens.contiguous()
    y, W, z = run(inputs)
    return y if y.dtype == q.dtype else y.to(q.dtype), FastWeightState(W, z)


def _run_until(end: int, backend: str, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a call on the tokens before `end` alone, so that nothing depends on the others; y is 0 there."""
    (_, T, *_), v = inputs.q.shape, inputs.v
    if end == 0:
        return v.new_zeros(*inputs.q.shape[:2], *v.shape[2:]), *inputs.initial_state()
    tokens = {"q": inputs.q, "k": inputs.k, "v": v, "mask": inputs.mask, "starts": inputs.starts, **inputs.gates}
    # Keys and values may be several for each query.
    used: dict[str, Any] = {name: x[:, : x.shape[1] // T * end] for name, x in tokens.items() if x is not None}
    y, after = fast_weight_memory(
        **used,
        rule=inputs.rule,
        normalization="attention" if inputs.normalized else None,
        cu_seqlens=inputs.cu_seqlens,
        state=None if inputs.W is None else FastWeightState(inputs.W, inputs.z),
        backend=backend,
        features=inputs.features,
        in_place=inputs.in_place,
    )
    return pad(y, (0, 0, 0, 0, 0, T - end)), after.W, after.z


def _prepare(inputs: Inputs, spec: Spec, backend: str) -> Executable:
    """Check a call, and return what runs calls of its spec."""
    if writes_per_token(inputs) == 1:
        check(inputs)
        return backends.prepare(spec, backend)
    steps = one_write_per_step(inputs)
    check(steps)
    return on_single_writes(backends.prepare(Spec.of(steps), backend))


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast q, k and v to the dtype of autocast, where it is on, as the inputs of a matrix product are."""
    first = tensors[0]
    if not isinstance(first, Tensor) or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in floats else x for x in tensors)


def check(inputs: Inputs) -> None:
    """Raise an error that says what would work, unless all arguments fit together."""
    q = inputs.q
    check_features(inputs.features)
    _check_heads(q, inputs.k, inputs.v)
    _check_gates(inputs)
    check_marks("mask", inputs.mask, q, "True for tokens that count")
    check_marks("starts", inputs.starts, q, "True where a new text begins")
    check_packing(q, inputs.cu_seqlens)
    for name, x in (("mask", inputs.mask), ("starts", inputs.starts), ("cu_seqlens", inputs.cu_seqlens)):
        _check_device(name, x, q)
    _check_state(inputs)


def check_features(features: Any) -> None:
    """Refuse anything but features."""
    if not isinstance(features, (Features, MapFeatures)):
        raise TypeError(
            f"features must be Features.named(...), got {features!r}; `from fastweights.ops.features import "
            'Features` and pass Features.named("elu", sum=True), say, or map q and k yourself with feature_map(...)'
        )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
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
    if min(q.shape) == 0 or min(v.shape) == 0:
        raise ValueError(f"every size must be at least 1, got q {tuple(q.shape)} and v {tuple(v.shape)}")
    if v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2]:
        shape = f"({', '.join(map(str, q.shape[:3]))}, M)"
        raise ValueError(
            f"v must have shape {shape} to go with q {tuple(q.shape)}, or a multiple of its heads, got {tuple(v.shape)}"
        )


def _check_gates(inputs: Inputs) -> None:
    rule, q, heads, gates = inputs.rule, inputs.q, inputs.v.shape[:3], inputs.gates
    D = inputs.features.size(q.shape[3])
    for gate in rule.gates:
        axes, shape = ("(B, T, H)", heads) if gate.per == "head" else ("(B, T, H, D)", (*heads, D))
        names = [name for name in (gate.name, f"log_{gate.name}") if name in gates and name in rule.idle]
        if len(names) != 1:
            what = f"not both {' and '.join(names)}" if names else "got None"
            raise ValueError(f"rule {rule.name!r} needs {gate.name} of shape {tuple(shape)}, {what}")
        name, x = names[0], gates[names[0]]
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor of shape {tuple(shape)}, got {type(x).__name__}")
        per_key = gate.fades and gate.name not in rule.heads_only
        if x.shape != shape and not (per_key and x.shape == (*heads, D)):
            more = f" or (B, T, H, D) = {(*heads, D)}" if per_key else ""
            if gate.fades and not per_key and x.dim() == 4:
                more = f", as rule {rule.name!r} also erases or writes by it"
            raise ValueError(f"{name} must have shape {axes} = {tuple(shape)}{more}, got {tuple(x.shape)}")
        if x.dtype not in (q.dtype, torch.promote_types(q.dtype, torch.float32)):
            raise TypeError(f"{name} has dtype {x.dtype} beside q of {q.dtype}; cast it to {q.dtype}")
        _check_device(name, x, q)
    for name in gates:
        if name not in rule.idle:
            takes = " and ".join(rule.gate_names) or "no gates"
            known = {gate for other in RULES.values() for gate in other.idle}
            if name not in known:
                check_name((*sorted(known), *_ARGUMENTS), name, "argument of fast_weight_memory")
            x = gates[name]
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"rule {rule.name!r} has no {name} (it takes {takes}), got shape {got}; leave it out")


def check_marks(name: str, marks: Tensor | None, x: Tensor, meaning: str) -> None:
    """Refuse anything but None and one truth value for each token of x (B, T, ...)."""
    if marks is None:
        return
    shape = tuple(x.shape[:2])
    if not isinstance(marks, Tensor) or marks.dtype != torch.bool:
        kind = marks.dtype if isinstance(marks, Tensor) else type(marks).__name__
        raise TypeError(f"{name} must be a bool tensor of shape (B, T) = {shape}, {meaning}, got {kind}")
    if marks.shape != shape:
        raise ValueError(f"{name} must have shape (B, T) = {shape}, got {tuple(marks.shape)}")


def check_packing(x: Tensor, cu_seqlens: Tensor | None) -> None:
    """Refuse anything but None and bounds of sequences in the one row of x (1, T, ...)."""
    B = x.shape[0]
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError("cu_seqlens must be an int32 or int64 tensor [0, end of sequence 1, ..., T]")
    if B != 1 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens takes sequences packed along T with B = 1 and N + 1 bounds, got B = {B} and "
            f"cu_seqlens of shape {tuple(cu_seqlens.shape)}"
        )


def _checked_end(cu_seqlens: Tensor, T: int) -> int:
    """Return the last bound, or T where it is not read here; refuse bounds that do not rise from 0 to T or less.

    While tracing they have no numbers yet. On a GPU a kernel checks, so that the host need not wait and a CUDA graph
    can be replayed with other bounds; wrong ones fail an assertion, which shows at the next wait.
    `FASTWEIGHTS_CHECK_BOUNDS=host` reads them at once.
    """
    if torch.compiler.is_compiling():
        return T
    if cu_seqlens.is_cuda and os.environ.get(CHECK_BOUNDS) != "host":
        torch._assert_async(_bounds_hold(cu_seqlens, T), f"cu_seqlens must rise from 0 to T = {T} or less")
        return T
    return checked_bounds(cu_seqlens, T)[-1]


def _bounds_hold(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return whether bounds rise from 0 to T or less, as a tensor."""
    return (cu_seqlens[1:] >= cu_seqlens[:-1]).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= T)


def _check_state(inputs: Inputs) -> None:
    """Refuse a state that does not belong to such a call."""
    if inputs.W is None:
        return
    q, cu_seqlens, dtype = inputs.q, inputs.cu_seqlens, inputs.state_dtype
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    shape = (N, inputs.v.shape[2], inputs.features.size(q.shape[3]), inputs.v.shape[3])
    if inputs.normalized != (inputs.z is not None):
        has, wants = ("no z", "needs one") if inputs.normalized else ("a z", "has none")
        raise ValueError(f"state has {has} but this call {wants}; it comes from another normalization")
    for name, x, wanted in (("W", inputs.W, shape), ("z", inputs.z, shape[:3])):
        if x is None:
            continue
        if x.shape != wanted:
            raise ValueError(f"state.{name} must have shape {wanted} here, got {tuple(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"state.{name} must be {dtype} beside {q.dtype} inputs, got {x.dtype}; use state.to(...)")
        _check_device(f"state.{name}", x, q)


def _check_device(name: str, x: Tensor | None, q: Tensor) -> None:
    if x is not None and x.device != q.device:
        raise ValueError(f"{name} is on {x.device} but q on {q.device}; move it there with .to({str(q.device)!r})")


_ARGUMENTS = tuple(fast_weight_memory.__kwdefaults__ or ())
