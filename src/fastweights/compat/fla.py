"""flash-linear-attention's functions, computed here: any device, any dtype from float16 to float64, any head size.

Names, order and defaults of arguments are those of fla-core 0.6.0, and so are layouts: q and k (B, T, H, K), v
(B, T, HV, V), `beta` and `g` (B, T, HV), or (B, T, HV, K) for decays per key channel, states (N, HV, K, V). `g` is the
natural logarithm of a decay, and `scale` is K^-0.5 if None. Arguments that only say how fla computes (`chunk_size`,
`chunk_indices`, `cu_seqlens_cpu`, `disable_recompute`, `safe_gate`, `use_graph`, `max_num_seqs`) make no difference.
"""

from __future__ import annotations

import inspect
import os
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from fastweights.compat.calls import Result, State, run

# Signatures by the line and not by the argument, for comparison with fla's.
# fmt: off

def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, *, chunk_size: int | None = None,
) -> Result:
    """Erase what is stored under a key as the new value is written: DeltaNet."""
    return run("delta_rule", **locals())


def fused_recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_delta_rule`; beta is 1 if None."""
    return run("delta_rule", **locals())


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: object = None, *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int | None = None,
) -> Result:
    """Let the memory fade per head and apply the delta rule: Gated DeltaNet."""
    return run("gated_delta_rule", **locals())


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_gated_delta_rule`, with decays per head (g), per key channel (gk), both or neither."""
    return run("gated_delta_rule", **locals())


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: object = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
) -> Result:
    """Let the memory fade per key channel and apply the delta rule: Kimi Delta Attention."""
    return run("kda", **locals())


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_kda`."""
    return run("kda", **locals())


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """Let the memory fade per key channel and add: gated linear attention."""
    return run("gla", **locals())


def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_gla`, with its g called gk; `reverse` goes from the last token to the first."""
    return run("gla", **locals())


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *,
    chunk_size: int | None = None,
) -> Result:
    """Let the memory fade per head and add: g for each token, or g_gamma for all."""
    return run("simple_gla", **locals())


def fused_chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_simple_gla`."""
    return run("simple_gla", **locals())


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_simple_gla`; `reverse` goes from the last token to the first."""
    return run("simple_gla", **locals())


def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, *, chunk_size: int | None = None,
) -> Result:
    """Let the memory fade by 1 - 2^(-5 - h) in head h and add: RetNet."""
    return run("retention", **locals())


def fused_chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_retention`."""
    return run("retention", **locals())


def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_retention`; `reverse` goes from the last token to the first."""
    return run("retention", **locals())


def chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: State = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> Result:
    """Add keys and values; with `normalize` the state is a pair with the sum of keys (N, 1, H, K)."""
    return run("linear_attn", **locals())


def fused_chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: State = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_linear_attn`."""
    return run("linear_attn", **locals())


def fused_recurrent_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: State = None,
    output_final_state: bool = False, reverse: bool = False, normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_linear_attn`, by default not normalised."""
    return run("linear_attn", **locals())


def chunk_comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor | None, g: Tensor, beta: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """Let the memory fade and take back what is stored under p, or under k if p is None: Comba."""
    return run("comba", **locals())


def fused_recurrent_comba(
    q: Tensor, k: Tensor, p: Tensor | None, v: Tensor, g: Tensor, beta: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:
    """Compute `chunk_comba`; p stands before v here."""
    return run("comba", **locals())


def chunk_gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, num_householder: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, cp_context: object = None,
) -> Result:
    """Let the memory fade once a token and apply the delta rule num_householder times: Gated DeltaProduct."""
    return run("gated_delta_product", **locals())


chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
# fmt: on


# fla's functions that ask its backends before they compute: where those are registered.
DISPATCHED = {
    "chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_kda": None,
    "fused_chunk_simple_gla": None,
    "fused_recurrent_simple_gla": None,
}
# What the kernels of its delta rules accept. They have a block for each head of each row along the second axis of their
# grid, which CUDA limits.
LONGEST_KEY, MOST_HEADS = 256, 65_535


def register_with_fla() -> list[str]:
    """Enter this package as a backend of an installed fla, for the calls of which `reason` says that it takes them.

    fla then still checks every call and falls back to its own kernels. FLA_FASTWEIGHTS=0 in the environment switches it
    off again.

    Returns:
        The names of fla's functions that ask for backends.
    """
    try:
        backends, operators = import_module("fla.backends"), import_module("fla.ops")
    except ImportError as error:
        raise ImportError(f"register_with_fla() needs fla-core 0.6: pip install fla-core==0.6.0 ({error})") from error
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise RuntimeError("FLA_DISABLE_BACKEND_DISPATCH=1 keeps fla from asking any backend; unset it and start again")
    content = {"backend_type": "fastweights", "env_var": "FLA_FASTWEIGHTS", "priority": 0}
    for name in DISPATCHED:
        content |= {name: staticmethod(globals()[name]), f"{name}_verifier": staticmethod(partial(reason, name))}
    backend = type("FastWeightsBackend", (backends.BaseBackend,), content)
    for name, operation in DISPATCHED.items():
        backends.register(operation or getattr(operators, name))(backend)
    return list(DISPATCHED)


def reason(name: str, /, *args: object, **kwargs: object) -> tuple[bool, str]:
    """Say whether this package takes a call of fla's function `name` once it is registered, and why."""
    call = inspect.signature(globals()[name]).bind(*args, **kwargs).arguments
    for argument in ("cp_context", "return_intermediate_states"):
        if call.get(argument):
            return False, f"fastweights does not support {argument}"
    q, (K, V) = call["q"], (call["q"].shape[-1], call["v"].shape[-1])
    if q.device.type in ("cpu", "mps"):
        return True, f"fla has no kernels for tensors on {q.device.type}"
    if q.dtype == torch.float64:
        return True, "fla has no kernels for float64"
    if q.dtype == torch.float32 and name != "fused_recurrent_simple_gla":
        return True, "fla rounds float32 to TF32 in its products"
    if name in ("chunk_gated_delta_rule", "chunk_kda"):
        if K > LONGEST_KEY:
            return True, f"fla takes keys of at most {LONGEST_KEY} numbers, got {K}"
        if (heads := q.shape[0] * call["v"].shape[2]) > MOST_HEADS:
            return True, f"fla can launch its kernels for at most {MOST_HEADS} heads over all rows, got {heads}"
    state = call.get("initial_state")
    if name == "chunk_kda" and state is not None and state.dtype != torch.float32:
        return True, f"fla takes initial states in float32 only, got {state.dtype}"
    if name == "chunk_gated_delta_rule":
        if min(K, V) < 64:
            return True, f"fla computes in tiles of 64, more than heads of {K} and {V} fill"
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call.values()):
            fla = import_module("fla.utils")
            if fla.IS_NVIDIA_HOPPER and fla.TRITON_ABOVE_3_4_0 and not fla.TRITON_ABOVE_3_7_1:
                return True, "fla refuses gradients of gated rules on Hopper with Triton 3.4 to 3.7.0"
    return False, "fla has kernels for it"
