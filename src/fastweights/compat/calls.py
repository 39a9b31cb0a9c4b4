"""What the arguments of flash-linear-attention mean here: one translation for all of its functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.features import Features
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.normalization import smooth_l2_normalize
from fastweights.ops.rules import BETA, DECAY, Gate, Read, Rule, outer
from fastweights.ops.state import FastWeightState

State = Tensor | tuple[Tensor | None, Tensor] | None
Result = tuple[Tensor, State]


class Family(NamedTuple):
    """Functions of one recurrence.

    Attributes:
        fading: our rule where a gate is given.
        lasting: our rule where none is.
        per_key: whether `g` is one for each key channel, (B, T, HV, K), and not one a head, (B, T, HV).
    """

    fading: str
    lasting: str
    per_key: bool = False


FAMILIES = {
    "delta_rule": Family("gated_delta", "delta"),
    "gated_delta_rule": Family("gated_delta", "delta"),
    "gated_delta_product": Family("gated_delta", "delta"),
    "comba": Family("gated_delta", "delta"),
    "kda": Family("gated_delta", "delta", per_key=True),
    "linear_attn": Family("decay", "sum"),
    "retention": Family("decay", "sum"),
    "simple_gla": Family("decay", "sum"),
    "gla": Family("decay", "sum", per_key=True),
}


def _auxiliary_step(W: Tensor, k: Tensor, v: Tensor, read: Read, beta: Tensor, decay: Tensor, p: Tensor) -> Tensor:
    """W <- decay W, then W + beta (v - W p) ⊗ k: Comba with an auxiliary key p of any direction."""
    W = decay.unsqueeze(-1) * W
    return W + outer(k, beta * (v - read(W, p)))


# The family that kernels compute reads back under k itself, so this one runs on the backend `reference` only.
AUXILIARY = Rule(
    "comba with p",
    "Hu et al. 2025",
    "The gated delta rule that reads back under an auxiliary key.",
    (BETA, DECAY, Gate("p", idle=0.0, per="key")),
    _auxiliary_step,
)


def run(
    name: str,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    g_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    p: Tensor | None = None,
    num_householder: int = 1,
    scale: float | None = None,
    initial_state: State = None,
    output_final_state: bool = False,
    normalize: bool = False,
    reverse: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    starts: Tensor | None = None,
    return_intermediate_states: bool = False,
    cp_context: object = None,
    **ways: object,
) -> Result:
    """Run the function of flash-linear-attention called `name`.

    `ways` are arguments that say how it computes and not what; they make no difference here.

    Returns:
        o in the dtype of q, and the final state, in float32 or, for float64 inputs, in float64.
    """
    for argument, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{argument} must have shape (B, T, heads, size), got {tuple(x.shape)}")
    if cp_context is not None:
        raise ValueError("cp_context is not supported: run whole sequences on one device, or their parts one by one")
    if return_intermediate_states:
        raise ValueError("return_intermediate_states is not supported; call with output_final_state=True for each part")
    if k.shape[1] != num_householder * q.shape[1]:
        steps = f"num_householder = {num_householder} times the {q.shape[1]} tokens of q"
        raise ValueError(f"k must have {steps}, got {k.shape[1]}")
    family, (B, T, H, K), (HV, V) = FAMILIES[name], q.shape, v.shape[2:]
    dtype, common = q.dtype, torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    wide = torch.promote_types(common, torch.float32)
    q, k, v = q.to(common), k.to(common), v.to(common)
    if name == "retention":
        if HV != H:
            raise ValueError(
                f"v must have the heads of q, got {HV} and {H}; for more, call chunk_simple_gla with g_gamma"
            )
        g_gamma = (-(2.0 ** (-5 - torch.arange(H, dtype=wide, device=q.device)))).log1p()

    gates: dict[str, Any] = {}
    if use_gate_in_kernel:
        g = _activated(g, A_log, dt_bias, lower_bound, wide)
    log_decay = _log_decay(g, gk, g_gamma, (B, T, HV), K, family.per_key)
    if log_decay is not None:
        gates["log_decay"] = log_decay
    if family.lasting == "delta":
        gates["beta"] = _step_size(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval, wide)
    rule: str | Rule = family.lasting if log_decay is None and gv is None else family.fading
    if p is not None:
        _expect("p", p, "(B, T, H, K)", (B, T, H, K))
        rule = AUXILIARY
        gates["p"] = (smooth_l2_normalize(p) if use_qk_l2norm_in_kernel else p).repeat_interleave(HV // H, 2)
    gates = {gate: x if x.dtype == common else x.to(wide) for gate, x in gates.items()}

    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    state = _state(initial_state, (N, HV, K, V), wide, q.device, normalize, state_v_first)
    if gv is not None:
        _expect("gv", gv, "(B, T, HV, V)", (B, T, HV, V))
        v, gates = v.flatten(2).unsqueeze(-1), _per_value(gates, gv.to(wide).flatten(2), V)
        state = None if state is None else FastWeightState(state.W.mT.reshape(N, HV * V, K, 1))
    if reverse:
        q, k, v, gates = q.flip(1), k.flip(1), v.flip(1), {gate: x.flip(1) for gate, x in gates.items()}
    backwards = torch.arange(N - 1, -1, -1, device=q.device) if reverse and cu_seqlens is not None else None
    if cu_seqlens is not None and backwards is not None:
        cu_seqlens, state = T - cu_seqlens.flip(0), None if state is None else state.reorder(backwards)
    o, last = fast_weight_memory(
        q,
        k,
        v,
        rule=rule,
        normalization="attention" if normalize else None,
        cu_seqlens=cu_seqlens,
        starts=starts,
        state=state,
        features=Features.named("none", l2=use_qk_l2norm_in_kernel, scale=K**-0.5 if scale is None else scale),
        **gates,
    )
    o, last = o.flip(1) if reverse else o, last if backwards is None else last.reorder(backwards)
    final = None
    if output_final_state:
        # With gv, heads of one value channel each are put together again.
        W = last.W if gv is None else last.W.view(N, HV, V, K).mT
        final = (W.mT if state_v_first else W).contiguous()
    return o.reshape(B, T, HV, V).to(dtype), final if last.z is None else (final, last.z.unsqueeze(1))


def _expect(name: str, x: Tensor, axes: str, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {axes} = {shape}, got {tuple(x.shape)}")


def _activated(
    g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, wide: torch.dtype
) -> Tensor:
    """Return the log decay -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias))."""
    if g is None or (A_log is None and lower_bound is None):
        missing = "g" if g is None else "A_log"
        raise ValueError(f"use_gate_in_kernel=True needs {missing}, got None; without it, g is the log decay itself")
    x, sizes = g.to(wide), g.shape[2:]
    if dt_bias is not None:
        if dt_bias.numel() != sizes.numel():
            raise ValueError(f"dt_bias must have one number for each of {tuple(sizes)}, got {tuple(dt_bias.shape)}")
        x = x + dt_bias.to(wide).view(sizes)
    if A_log is not None and A_log.numel() != sizes[0]:
        raise ValueError(f"A_log must have one number for each of {sizes[0]} heads, got {tuple(A_log.shape)}")
    rate = 1 if A_log is None else A_log.to(wide).exp().view(sizes[0], *(1 for _ in sizes[1:]))
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()


def _log_decay(
    g: Tensor | None, gk: Tensor | None, g_gamma: Tensor | None, heads: tuple[int, int, int], K: int, per_key: bool
) -> Tensor | None:
    """Return the logarithm of the decay per head (B, T, HV) or per key channel (B, T, HV, K); None for no decay."""
    if g_gamma is not None:
        if g is not None:
            raise ValueError("give g, a decay for each token, or g_gamma, one for all tokens, and not both")
        _expect("g_gamma", g_gamma, "(H,)", heads[2:])
        return g_gamma.expand(heads)
    if g is not None:
        _expect("g", g, "(B, T, HV, K)" if per_key else "(B, T, HV)", (*heads, K) if per_key else heads)
    if gk is None:
        return g
    _expect("gk", gk, "(B, T, HV, K)", (*heads, K))
    return gk if g is None else g.unsqueeze(-1) + gk


def _per_value(gates: dict[str, Tensor], gv: Tensor, V: int) -> dict[str, Tensor]:
    """Return the gates for one head a value channel, in which the memory also fades by exp(gv), (B, T, HV V).

    Value channels do not mix in any of these recurrences, so that each can be a head of its own.
    """
    repeated = {gate: x.repeat_interleave(V, 2) for gate, x in gates.items()}
    others = repeated.get("log_decay")
    if others is not None:
        gv = others + (gv if others.dim() == 3 else gv.unsqueeze(-1))
    return {**repeated, "log_decay": gv}


def _step_size(beta: Tensor | None, v: Tensor, sigmoid: bool, doubled: bool, wide: torch.dtype) -> Tensor:
    """Return beta (B, T, HV) itself, of which logits may be given; 1 for None."""
    if doubled and not sigmoid:
        raise ValueError(
            "allow_neg_eigval=True doubles the sigmoid of beta, so it needs use_beta_sigmoid_in_kernel=True; betas "
            "that are no logits may be up to 2 as they are"
        )
    if beta is None:
        return v.new_ones(v.shape[:3])
    return beta.to(wide).sigmoid() * (2 if doubled else 1) if sigmoid else beta


def _state(
    initial: State, shape: tuple[int, ...], wide: torch.dtype, device: torch.device, normalize: bool, v_first: bool
) -> FastWeightState | None:
    """Return the state to start from, which with `normalize` may have a sum of keys (N, 1, H, K) beside it."""
    W, z = initial if isinstance(initial, tuple) else (initial, None)
    if z is not None and not normalize:
        raise ValueError("initial_state is a pair with a sum of keys, which is for normalize=True; pass its first part")
    if W is None and z is None:
        return None
    if W is None:
        W = torch.zeros(shape, dtype=wide, device=device)
    else:
        N, HV, K, V = shape
        axes, wanted = ("(N, HV, V, K)", (N, HV, V, K)) if v_first else ("(N, HV, K, V)", shape)
        _expect("initial_state", W, axes, wanted)
        W = W.mT.to(wide).contiguous() if v_first else W.to(wide)
    if z is not None:
        _expect("the sum of keys in initial_state", z, "(N, 1, H, K)", (shape[0], 1, *shape[1:3]))
        z = z.squeeze(1).to(wide)
    elif normalize:
        z = torch.zeros(shape[:3], dtype=wide, device=device)
    return FastWeightState(W, z)
