"""What is NaN or infinite at one token changes no bit of what does not depend on it.

What depends on a token is asked of the plain loop over time, `reference`, whose outputs and gradients at one token
are computed from the tokens they depend on and from no others. `reference` itself is held against the definition.
"""

from functools import cache

import pytest
import torch

import fastweights as fw
from fastweights.ops import reference
from fastweights.ops.features import PLAIN, Features, MapFeatures
from fastweights.ops.gpu.memory.containment import contain
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Inputs
from tests.ops.calls import BY_FORM, CALLS, FAMILY, HERE, NORMALIZATIONS, gate_names, gradients, random_call

# Backends that are held to what `reference` shows; each is compared with itself.
EXACT = [name for name in HERE if name != "reference"]
B, T, H = 2, 40, 2
# In the first of two chunks of 32 tokens, at which every backend cuts sequences of such sizes.
ROW, TOKEN, HEAD = 0, 20, 1
VALUES = {"nan": float("nan"), "inf": float("inf")}
FORMS = ["rows", "starts", "starts in the next chunk", "packed"]


def call_of(rule, normalization, form):
    """Return a call, and the options that cut its rows into texts."""
    call = random_call(rule, normalization, 1 if form == "packed" else B, T, H, 4, 3, torch.float32)
    # A decay of 0 empties the memory, too.
    for name, gate in call.gates.items():
        call.gates[name] = gate.clamp(-3, -0.05) if name.startswith("log_") else gate.clamp(0.05, 0.95)
    if form == "rows":
        return call, {}
    if form == "packed":
        bounds = [0, 8, 26, 26, T]
        call.state = random_call(rule, normalization, len(bounds) - 1, 1, H, 4, 3, torch.float32, seed=3).state
        return call, {"cu_seqlens": torch.tensor(bounds)}
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[ROW, [8, 26] if form == "starts" else [36]] = True
    return call, {"starts": starts}


def spoil(call, tensor, value):
    """Put `value` into one feature of one token of one head."""
    x = {"q": call.q, "k": call.k, "v": call.v, **call.gates}[tensor]
    x[(ROW, TOKEN, HEAD, *[1] * (x.dim() - 3))] = VALUES[value]


def everything(rule, normalization, form, backend, tensor=None, value=None):
    """Return outputs and gradients as (rows, features): one row a token and head, or a state."""
    call, options = call_of(rule, normalization, form)
    if tensor is not None:
        spoil(call, tensor, value)
    call = call.requiring_grad()
    outputs = call.run(backend, **options)
    found = [*outputs, *gradients(outputs, call.inputs())]
    of_states = len(outputs) - 1
    states = [*range(1, 1 + of_states), *range(len(found) - of_states, len(found))]
    flat = [x.detach().flatten(0, 1 if i in states else 2) for i, x in enumerate(found)]
    return [x.reshape(len(x), -1) for x in flat]


clean = cache(everything)


@cache
def independent(rule, normalization, form, tensor, value):
    """Return which rows of which result the plain loop computes without the token."""
    spoilt = everything(rule, normalization, form, "reference", tensor, value)
    return [(a == b).all(-1) for a, b in zip(clean(rule, normalization, form, "reference"), spoilt, strict=True)]


CASES = [(rule, tensor) for rule in FAMILY for tensor in ("q", "k", "v", *gate_names(rule))]
CASES += [(rule, tensor) for rule in BY_FORM for tensor in ("k", gate_names(rule)[-1])]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("rule", "tensor"), CASES)
def test_what_does_not_depend_on_a_token_keeps_every_bit(rule, tensor, normalization, form):
    for value in ("nan", "inf") if tensor == "v" else ("nan",):
        stays = independent(rule, normalization, form, tensor, value)
        for backend in EXACT:
            before = clean(rule, normalization, form, backend)
            after = everything(rule, normalization, form, backend, tensor, value)
            assert not after[0].isfinite().all()
            for i, (a, b, same) in enumerate(zip(before, after, stays, strict=True)):
                assert torch.equal(a[same], b[same]), f"{backend}, {value}: result {i}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", CALLS)
def test_outputs_by_the_definition(rule, form):
    """Tokens before it, of other rows, heads and texts; and the states of other rows, heads and texts."""
    for backend in ["reference", *EXACT] if rule in (*FAMILY, *BY_FORM) else ["reference"]:
        for tensor in ("q", "k", "v", *gate_names(rule)):
            call, options = call_of(rule, None, form)
            y, W = call.run(backend, **options)
            spoil(call, tensor, "nan")
            y_spoilt, W_spoilt = call.run(backend, **options)
            end = {"rows": T, "starts": 26, "packed": 26}.get(form, 36)
            end = TOKEN + 1 if tensor == "q" else end
            spoilt = torch.zeros(y.shape[:3], dtype=torch.bool)
            spoilt[ROW, TOKEN:end, HEAD] = True
            assert torch.equal(y[~spoilt], y_spoilt[~spoilt])
            assert not y_spoilt[spoilt].isfinite().all(-1).any()
            state = torch.zeros(W.shape[:2], dtype=torch.bool)
            if tensor != "q" and form in ("rows", "packed"):
                state[1 if form == "packed" else ROW, HEAD] = True
            assert torch.equal(W[~state], W_spoilt[~state])
            assert W_spoilt[state].isnan().any() == state.any()


@pytest.mark.parametrize("backend", EXACT)
def test_a_state_that_is_not_finite_ends_where_a_text_starts(backend):
    call, options = call_of("gated_delta", None, "starts")
    clean = call.run(backend, **options)[0]
    call.state[0][ROW, HEAD, 2, 1] = float("inf")
    spoilt = call.run(backend, **options)[0]
    assert not spoilt[ROW, :8, HEAD].isfinite().all(-1).any()
    spoilt[ROW, :8, HEAD] = clean[ROW, :8, HEAD]
    assert torch.equal(spoilt, clean)


@pytest.mark.parametrize("backend", EXACT)
def test_an_overflow_ends_where_a_text_starts(backend):
    """Keys that are too long for the delta rule make the memory grow without end."""
    call, options = call_of("delta", None, "starts")
    clean = call.run(backend, **options)[0]
    call.k[ROW, 9:25, HEAD] = 1e4
    call.gates["beta"][ROW, 9:25, HEAD] = 1
    spoilt = call.run(backend, **options)[0]
    assert not spoilt[ROW, 22:26, HEAD].isfinite().any()
    assert torch.equal(spoilt[ROW, 26:], clean[ROW, 26:])
    assert torch.equal(spoilt[1:], clean[1:])


@pytest.mark.parametrize(("D", "M"), [(4, 3), (40, 35)])
@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
@pytest.mark.parametrize("backend", EXACT)
def test_an_overflow_changes_no_gradient_of_another_row(backend, rule, D, M):
    """Of small states, and of large ones, through which the C++ goes back in another way."""
    results = []
    for length in (1, 1e6):
        call = random_call(rule, None, B, T, H, D, M, torch.float32)
        call.k[ROW, 9:25] *= length
        call.gates["beta"][ROW, 9:25] = 1
        call = call.requiring_grad()
        outputs = call.run(backend)
        results.append([x.unflatten(0, (B, -1)) for x in (*outputs, *gradients(outputs, call.inputs()))])
    assert not results[1][0][ROW].isfinite().all()
    assert all(torch.equal(a[1 - ROW], b[1 - ROW]) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("features", [PLAIN, Features.named("dpfp", nu=1, sum=True, logits=True)], ids=["", "dpfp"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", [*FAMILY, "gated_delta log"])
@pytest.mark.parametrize("backend", ["reference", *EXACT])
def test_padding_may_hold_anything(backend, rule, normalization, features):
    """Whatever stands in tokens that the mask leaves out, nothing changes, and its gradient is 0."""
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[ROW, TOKEN:30] = False
    results = []
    for value in (0.5, float("nan")):
        call = random_call(rule, normalization, B, T, H, 4, 3, torch.float32)
        call.state = random_call(rule, normalization, B, 1, H, features.size(4), 3, torch.float32).state
        for x in (call.q, call.k, call.v, *call.gates.values()):
            x[ROW, TOKEN:30] = value
        call = call.requiring_grad()
        outputs = call.run(backend, mask=mask, features=features)
        results.append([*outputs, *gradients(outputs, call.inputs())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("phi", ["identity", "favor"])
def test_padding_of_attention_without_direction(phi, normalization, dtype):
    features = MapFeatures(fw.feature_map(phi, 4).eval())
    mask = torch.arange(9) < torch.tensor([[5], [9]])
    results = []
    for value in (0.5, float("nan")):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.rand(2, n, H, 4, generator=generator).to(dtype) for n in (7, 9, 9))
        k[~mask], v[~mask] = value, value
        inputs = [x.requires_grad_() for x in (q, k, v)]
        y = fw.linear_attention(*inputs, mask, normalization=normalization, features=features)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("rule", ["sum", "gated_delta"])
def test_texts_are_contained_on_a_gpu(rule, normalization, packed):
    """What the kernels are wrapped in marks the tokens and states that the plain loop spoils, and no others."""
    call = random_call(rule, normalization, 1 if packed else B, T, H, 4, 3, torch.float32)
    starts = torch.zeros(1 if packed else B, T, dtype=torch.bool)
    starts[:, [0, 12, 26] if packed else [8, 26]] = True
    bounds = torch.tensor([0, 8, 8, 26, 30, T]) if packed else None
    if packed:
        call.state = random_call(rule, normalization, 5, 1, H, 4, 3, torch.float32, seed=3).state
    call.k[0, 20, 1, 2] = call.v[0, 9, 0, 1] = call.q[0, 2, 1, 0] = float("nan")
    for state in call.state:
        state[0, 1] = float("inf")
        if packed:
            state[1:4, 0] = float("nan")
    call.k[-1, 38, 0] = float("nan")
    inputs = Inputs(RULES[rule], call.q, call.k, call.v, call.gates, *call.state, cu_seqlens=bounds, starts=starts)

    def run(clean):
        assert all(x.isfinite().all() for x in (clean.q, clean.k, clean.v, clean.W, *clean.gates.values()))
        return reference.run(clean)

    found = [x for x in contain(run)(inputs) if x is not None]
    for ours, want in zip(found, [x for x in reference.run(inputs) if x is not None], strict=True):
        lost = ~want.isfinite().flatten(3 if ours is found[0] else 2).all(-1)
        assert lost.any() and not lost.all()
        assert torch.equal(lost, ~ours.isfinite().flatten(3 if ours is found[0] else 2).all(-1))
        assert torch.equal(ours[~lost], want[~lost])
