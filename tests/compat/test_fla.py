"""flash-linear-attention's calls on our kernels, against the recurrences themselves."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from fastweights.compat import fla
from tests.compat.calls import NAMES, B, H, K, T, V, close, inputs, kind, loop, states, takes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
def test_functions_compute_their_recurrence(name, dtype, tolerance):
    call, state = inputs(name, dtype), states(B)
    o, final = getattr(fla, name)(**call, initial_state=state.to(dtype), output_final_state=True)
    assert o.dtype == dtype and final.dtype == torch.promote_types(dtype, torch.float32)
    expected, last = loop(name, **call, state=state.to(dtype))
    close(o, expected, tolerance)
    close(final, last, tolerance)
    assert getattr(fla, name)(**call)[1] is None


@pytest.mark.parametrize("name", [name for name in NAMES if kind(name) != "retention"])
def test_value_heads_may_share_heads_of_keys(name):
    call, state = inputs(name, HV=3 * H), states(B, 3 * H)
    o, final = getattr(fla, name)(**call, initial_state=state, output_final_state=True)
    expected, last = loop(name, **call, state=state)
    close(o, expected)
    close(final, last)


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_are_apart(name):
    bounds, call = [0, 4, 4, 5, T], inputs(name, B=1)
    state, n = states(4), call.get("num_householder", 1)
    packed = torch.tensor(bounds)
    o, final = getattr(fla, name)(**call, initial_state=state, output_final_state=True, cu_seqlens=packed)
    for i, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            close(final[i], state[i])
            continue
        one = {
            x: y if not torch.is_tensor(y) else y[:, start:end] if y.shape[1] == T else y[:, n * start : n * end]
            for x, y in call.items()
        }
        expected, last = loop(name, **one, state=state[i : i + 1])
        close(o[:, start:end], expected)
        close(final[i : i + 1], last)


@pytest.mark.parametrize("name", [name for name in NAMES if takes(name, "reverse")])
@pytest.mark.parametrize("packed", [False, True])
def test_reverse_goes_from_the_last_token_to_the_first(name, packed):
    call, state = inputs(name, B=1), states(2 if packed else 1)
    bounds = torch.tensor([0, 4, T]) if packed else None
    function = getattr(fla, name)
    o, final = function(**call, reverse=True, initial_state=state, output_final_state=True, cu_seqlens=bounds)
    for i, span in enumerate([slice(0, 4), slice(4, T)] if packed else [slice(0, T)]):
        one = {x: y[:, span].flip(1) if torch.is_tensor(y) else y for x, y in call.items()}
        expected, last = loop(name, **one, state=state[i : i + 1])
        close(o[:, span], expected.flip(1))
        close(final[i : i + 1], last)


@pytest.mark.parametrize("name", [name for name in NAMES if takes(name, "state_v_first")])
def test_states_may_have_values_first(name):
    call, state = inputs(name), states(B)
    function = getattr(fla, name)
    o, final = function(**call, initial_state=state.mT, output_final_state=True, state_v_first=True)
    expected, last = function(**call, initial_state=state, output_final_state=True)
    close(o, expected)
    close(final, last.mT)
    assert final.is_contiguous()


@pytest.mark.parametrize("name", [name for name in NAMES if takes(name, "use_qk_l2norm_in_kernel")])
def test_keys_and_queries_are_normalised_inside(name):
    call = inputs(name)
    call["k"], call["q"] = 3 * call["k"], 2 * call["q"]
    o, _ = getattr(fla, name)(**call, use_qk_l2norm_in_kernel=True)
    unit = {x: y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x, y in call.items() if x in ("q", "k", "p")}
    close(o, loop(name, **{**call, **unit})[0])


@pytest.mark.parametrize("name", NAMES)
def test_scale_of_queries(name):
    call = inputs(name)
    close(getattr(fla, name)(**call, scale=0.7)[0], loop(name, **call)[0] * 0.7 * K**0.5)


@pytest.mark.parametrize("name", [name for name in NAMES if takes(name, "use_beta_sigmoid_in_kernel")])
@pytest.mark.parametrize("largest", [1, 2])
def test_beta_may_be_a_logit(name, largest):
    call = inputs(name)
    o, _ = getattr(fla, name)(**call, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=largest == 2)
    close(o, loop(name, **{**call, "beta": largest * call["beta"].sigmoid()})[0])


@pytest.mark.parametrize("name", [name for name in NAMES if takes(name, "use_gate_in_kernel")])
@pytest.mark.parametrize("bias", [False, True])
def test_gates_from_raw_numbers(name, bias):
    call, sizes = inputs(name), (H, K) if kind(name) == "kda" else (H,)
    A_log, dt_bias = torch.randn(H).double(), torch.randn(sizes).double()
    gate = {"A_log": A_log, "dt_bias": dt_bias.flatten() if bias else None}
    o, _ = getattr(fla, name)(**call, use_gate_in_kernel=True, **gate)
    raw = call["g"] + (dt_bias if bias else 0)
    rate = A_log.exp().view(H, 1) if kind(name) == "kda" else A_log.exp()
    close(o, loop(name, **{**call, "g": -rate * (1 + raw.exp()).log()})[0])
    if kind(name) == "kda":
        o, _ = getattr(fla, name)(**call, use_gate_in_kernel=True, lower_bound=-4.0, **gate)
        close(o, loop(name, **{**call, "g": -4 * (rate * raw).sigmoid()})[0])
        o, _ = getattr(fla, name)(**call, use_gate_in_kernel=True, lower_bound=-4.0, dt_bias=gate["dt_bias"])
        close(o, loop(name, **{**call, "g": -4 * raw.sigmoid()})[0])


def test_decays_per_head_and_key_multiply():
    call = inputs("fused_recurrent_gated_delta_rule")
    call["gk"] = F.logsigmoid(torch.randn(B, T, H, K).double())
    close(fla.fused_recurrent_gated_delta_rule(**call)[0], loop("delta", **call)[0])
    call["g"] = None
    close(fla.fused_recurrent_gated_delta_rule(**call)[0], loop("delta", **call)[0])


@pytest.mark.parametrize(
    "name,others",
    [
        (name, others)
        for name in NAMES
        for others in [(), ("g",), ("gk",), ("g", "gk")]
        if all(takes(name, gate) for gate in (*others, "gv"))
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_decays_per_value_channel(name, others, packed):
    call, state = inputs(name, B=1, HV=2 * H), states(2 if packed else 1, 2 * H)
    sizes = {"g": (), "gk": (K,), "gv": (V,)}
    call |= {gate: F.logsigmoid(torch.randn(1, T, 2 * H, *sizes[gate]).double()) for gate in (*others, "gv")}
    call |= {gate: None for gate in ("g", "gk") if gate in call and gate not in others}
    bounds = torch.tensor([0, 4, T]) if packed else None
    o, final = getattr(fla, name)(**call, initial_state=state, output_final_state=True, cu_seqlens=bounds)
    for i, span in enumerate([slice(0, 4), slice(4, T)] if packed else [slice(0, T)]):
        one = {x: y[:, span] if torch.is_tensor(y) else y for x, y in call.items()}
        expected, last = loop(name, **one, state=state[i : i + 1])
        close(o[:, span], expected)
        close(final[i : i + 1], last)
    first, _ = getattr(fla, name)(**call, initial_state=state.mT, state_v_first=True, cu_seqlens=bounds)
    close(first, o)


@pytest.mark.parametrize("name", [name for name in NAMES if takes(name, "g_gamma")])
def test_one_decay_for_all_tokens(name):
    call, gamma = inputs(name), F.logsigmoid(torch.randn(H).double())
    call["g"] = None
    close(getattr(fla, name)(**call, g_gamma=gamma)[0], loop(name, **{**call, "g": gamma.expand(B, T, H)})[0])


@pytest.mark.parametrize("name", ["chunk_gated_delta_product", "chunk_simple_gla"])
def test_without_gates_nothing_fades(name):
    call = inputs(name)
    call["g"] = None
    close(getattr(fla, name)(**call)[0], loop(name, **call)[0])


@pytest.mark.parametrize("name", ["fused_recurrent_delta_rule", "chunk_comba"])
def test_beta_and_auxiliary_keys_may_be_left_out(name):
    call = inputs(name, HV=2 * H)
    call.update(beta=None, **({"p": None} if "p" in call else {}))
    close(getattr(fla, name)(**call)[0], loop(name, **call)[0])


@pytest.mark.parametrize("name", [name for name in NAMES if takes(name, "normalize")])
def test_normalised_linear_attention_carries_its_sum_of_keys(name):
    call, function = inputs(name), getattr(fla, name)
    call["normalize"] = True
    call["q"], call["k"] = call["q"].exp(), call["k"].exp()
    weights = torch.einsum("bihk,bjhk->bhij", call["q"], call["k"]).tril()
    expected = torch.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdim=True), call["v"])
    o, (S, z) = function(**call, output_final_state=True)
    close(o, expected)
    close(z, call["k"].sum(1, keepdim=True))
    parts = [{x: y[:, span] if torch.is_tensor(y) else y for x, y in call.items()} for span in (slice(4), slice(4, T))]
    first, state = function(**parts[0], output_final_state=True)
    second, (end, _) = function(**parts[1], initial_state=state, output_final_state=True)
    close(torch.cat([first, second], 1), expected)
    close(end, S)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_dtypes_may_differ(dtypes):
    call = inputs("chunk_gated_delta_rule", torch.float32)
    call["q"], call["k"], call["v"] = call["q"].to(dtypes[0]), call["k"].to(dtypes[0]), call["v"].to(dtypes[1])
    call["g"], state = call["g"].double(), states(B).half()
    o, final = fla.chunk_gated_delta_rule(**call, initial_state=state, output_final_state=True)
    assert o.dtype == dtypes[0] and final.dtype == torch.float32
    expected, last = loop("gated_delta_rule", **call, state=state)
    close(o, expected, 1e-2 if dtypes[0] == torch.bfloat16 else 2e-5)
    close(final, last, 2e-5)


@pytest.mark.parametrize(
    "name", ["chunk_kda", "chunk_gla", "chunk_comba", "chunk_gated_delta_product", "chunk_linear_attn"]
)
def test_gradients(name):
    call, state = inputs(name, B=1, T=3), states(1)
    tensors = {x: y.requires_grad_() for x, y in {**call, "initial_state": state}.items() if torch.is_tensor(y)}
    rest = {x: y for x, y in call.items() if not torch.is_tensor(y)}

    def function(*values):
        return getattr(fla, name)(**dict(zip(tensors, values, strict=True)), **rest, output_final_state=True)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))


def test_gradients_of_raw_gates():
    call = inputs("chunk_kda", B=1, T=3)
    raw = [torch.randn(H).double().requires_grad_(), torch.randn(H * K).double().requires_grad_()]

    def function(A_log, dt_bias):
        return fla.chunk_kda(**call, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)[0]

    assert torch.autograd.gradcheck(function, raw)


def test_calls_compile_without_graph_breaks():
    call = inputs("chunk_gated_delta_rule", torch.float32)
    compiled = torch.compile(fla.chunk_gated_delta_rule, backend="eager", fullgraph=True)
    close(compiled(**call)[0], loop("gated_delta_rule", **call)[0], 2e-5)


@pytest.mark.parametrize(
    "name,wrong,message",
    [
        ("chunk_gla", {"v": torch.zeros(T, V)}, r"v must have shape \(B, T, heads, size\), got \(11, 3\)"),
        (
            "fused_recurrent_gla",
            {"gv": torch.zeros(1)},
            r"gv must have shape \(B, T, HV, V\) = \(2, 11, 2, 3\), got \(1,\)",
        ),
        ("chunk_kda", {"cp_context": object()}, "cp_context is not supported: run whole sequences on one device"),
        ("chunk_kda", {"return_intermediate_states": True}, "call with output_final_state=True for each part"),
        ("chunk_kda", {"allow_neg_eigval": True}, "needs use_beta_sigmoid_in_kernel=True; betas"),
        ("chunk_kda", {"use_gate_in_kernel": True}, "use_gate_in_kernel=True needs A_log, got None"),
        (
            "chunk_kda",
            {"use_gate_in_kernel": True, "A_log": torch.ones(9)},
            r"one number for each of 2 heads, got \(9,\)",
        ),
        (
            "chunk_kda",
            {"g": torch.zeros(B, T, H)},
            r"g must have shape \(B, T, HV, K\) = \(2, 11, 2, 5\), got \(2, 11, 2\)",
        ),
        ("chunk_comba", {"p": torch.zeros(B, T, H, 9)}, r"p must have shape \(B, T, H, K\) = \(2, 11, 2, 5\)"),
        ("chunk_simple_gla", {"g_gamma": torch.zeros(H)}, "give g, a decay for each token, or g_gamma"),
        (
            "chunk_gla",
            {"initial_state": torch.zeros(B, H, V, K)},
            r"\(N, HV, K, V\) = \(2, 2, 5, 3\), got \(2, 2, 3, 5\)",
        ),
        ("chunk_linear_attn", {"initial_state": (None, torch.zeros(B, 1, H, K))}, "which is for normalize=True"),
        (
            "chunk_retention",
            {"v": torch.zeros(B, T, 3 * H, V)},
            "v must have the heads of q, got 6 and 2; for more, call chunk_simple_gla with g_gamma",
        ),
        ("chunk_retention", {"q": torch.zeros(T)}, r"q must have shape \(B, T, heads, size\), got \(11,\)"),
        ("chunk_gated_delta_product", {"num_householder": 3}, "num_householder = 3 times the 11 tokens of q, got 22"),
    ],
)
def test_errors_say_what_was_given_and_what_works(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        getattr(fla, name)(**{**inputs(name), **wrong})
