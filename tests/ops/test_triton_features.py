"""Feature maps, normalisation and sigmoids inside the kernels, against the same in plain PyTorch, in the interpreter.

`test_in_the_interpreter` runs them.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fastweights.feature_maps import feature_map
from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.ops import chunked
from fastweights.ops.backends import choose
from fastweights.ops.features import Features
from fastweights.ops.gpu.memory import why_unfused
from fastweights.ops.gpu.memory.autograd import OPERATOR
from fastweights.ops.gpu.memory.variants import IEEE, Variant, configuration, holds_features, power_of_two, to_integers
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.normalization import sum_normalize
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Inputs, Spec
from tests.ops.calls import FAMILY
from tests.ops.interpreted import altered, as_fused, inside, poisoned, recurrence  # noqa: F401

pytest.importorskip("triton")

MAPS = [("elu", 0), ("relu", 0), ("dpfp", 1), ("dpfp", 3)]


@pytest.mark.parametrize(("name", "nu"), MAPS)
def test_means_what_the_modules_mean(name, nu):
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    phi = feature_map(name, 6, **({"nu": nu} if nu else {}))
    assert torch.equal(Features.named(name, nu).of(x), phi(x))
    assert torch.equal(Features.named(name, nu, sum=True).of(x), sum_normalize(phi(x)))
    assert Features.named(name, nu).size(6) == phi.dim


def test_nu_goes_with_dpfp():
    for name, nu in (("dpfp", 0), ("elu", 2)):
        with pytest.raises(ValueError, match="nu is for dpfp"):
            Features.named(name, nu)
    with pytest.raises(ValueError, match="unknown fused feature map 'favor'"):
        Features.named("favor")


def compare(
    features: Features,
    d: int = 12,
    M: int = 20,
    B: int = 1,
    T: int = 33,
    H: int = 2,
    *,
    gates: str = "e",
    tied: bool = True,
    kernels: Variant | None = None,
    bounds: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Outputs, states and every gradient, with slices of one projection as the inputs."""
    g = torch.Generator().manual_seed(0)
    N = B if bounds is None else len(bounds) - 1
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    projected = torch.randn(B, T, H, 2 * d + M + len(gates), generator=g, dtype=dtype)
    W = torch.randn(N, H, features.size(d), M, generator=g, dtype=dtype)
    leaves = [projected.requires_grad_(), W.requires_grad_()]
    # As wide as the projection, so that strides of dy are multiples of what those of q, k and v are.
    dy = torch.randn(projected.shape, generator=g, dtype=dtype)[..., :M]
    sent = [dy, torch.randn(W.shape, generator=g, dtype=dtype)]

    def everything(fused: bool) -> list[torch.Tensor]:
        q, k, v, *rest = projected.split([d, d, M, *[1] * len(gates)], -1)
        named = {name: gate.squeeze(-1) for name, gate in zip(gates, rest, strict=True)}
        if not fused:
            q, k = features.of(q), features.of(k)
            named = {name: features.gate(gate) for name, gate in named.items()}
        a, e, w = (named.get(name) for name in "aew")
        coefficients = (a, e, e if tied else w)
        more = {"features": features, "config": kernels} if fused else {}
        run = recurrence if fused else chunked.recurrence
        y, W_end = run(q, k, v, *coefficients, W, cu_seqlens, dtype, **more)
        return [y, W_end, *torch.autograd.grad([y, W_end], leaves, sent)]

    limit = 1e-11 if dtype == torch.float64 else 1e-5
    for ours, want in zip(everything(True), everything(False), strict=True):
        assert (ours - want).norm() <= limit * want.norm()


def kernels_for(features: Features, d: int = 12, fused: bool = True) -> Variant:
    config = configuration(features.size(d), 16, torch.float64, 99, 1, features)
    return as_fused(config) if fused else replace(config, columns=16)


@inside
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize(("name", "nu"), MAPS)
def test_every_map(name, nu, fused):
    features = Features.named(name, nu, sum=True, logits=True)
    compare(features, T=20, kernels=kernels_for(features, fused=fused))


@inside
@pytest.mark.parametrize(
    ("name", "nu", "fused", "ahead"),
    [
        *((*phi, fused, False) for phi in MAPS for fused in (True, False)),
        # Walks that leave gradients to another launch map keys alike, whatever is copied ahead.
        *((*phi, True, True) for phi in MAPS),
        ("dpfp", 3, False, True),
    ],
)
def test_tiles_loaded_both_ways(name, nu, fused, ahead):
    """A head every 32 numbers, as that takes; chunks in batches, the last of which is not full."""
    features = Features.named(name, nu, sum=True, logits=True)
    kernels = altered(kernels_for(features, 8, fused), both_ways=True, chunks_per_program=2, prefetch=ahead)
    compare(features, 8, 15, T=20 if fused else 33, H=1, kernels=kernels)


@inside
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize(("gates", "tied"), [("", False), ("a", False), ("aw", False), ("ae", True), ("aew", False)])
def test_every_set_of_gates(gates, tied, fused):
    features = Features.named("dpfp", 1, logits=True)
    compare(features, 8, T=18, H=1, gates=gates, tied=tied, kernels=kernels_for(features, 8, fused))


@inside
@pytest.mark.parametrize("T", [1, 7, 47])
def test_lengths(T):
    compare(Features.named("dpfp", 2, sum=True, logits=True), 5, 9, 2, T, 1, gates="ae", dtype=torch.float32)


@inside
@pytest.mark.parametrize("name", ["elu", "dpfp"])
def test_packed_sequences(name):
    """The features of a token past the end are not those of a zero, which ELU maps to 1."""
    features = Features.named(name, int(name == "dpfp"), sum=name == "dpfp", logits=True)
    compare(features, 8, 8, T=40, H=1, gates="aw", tied=False, bounds=[0, 0, 1, 17, 33, 40, 40])


@inside
def test_keys_without_any_feature():
    """relu of nothing but negative numbers: a sum of 0 divides nothing, and no gradient comes back."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 1, 8, generator=g, dtype=torch.float64) for _ in range(3))
    k[:, 3] = -k[:, 3].abs()
    q[:, 5] = -q[:, 5].abs()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    features = Features.named("relu", sum=True)
    results = []
    for run, phi in ((fast_weight_memory, {"features": features}), (fast_weight_memory, {})):
        a, b = (q, k) if phi else (features.of(q), features.of(k))
        y, _ = run(a, b, v, rule="sum", **phi)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for ours, want in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, want)


@inside
@pytest.mark.parametrize("normalization", ["none", "sum", "attention", "both"])
@pytest.mark.parametrize("rule", FAMILY)
def test_the_layer_is_the_same(rule, normalization, monkeypatch):
    """Fused where it can be, mapped before where not; all parameters get the gradient they got."""
    torch.manual_seed(0)
    layer = FastWeightAttention(
        12, 2, 6, rule, "dpfp", normalization, d_value=5, feature_map_options={"nu": 2}
    ).double()
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    results = []
    for backend in ("triton", "chunked"):
        layer.backend = backend
        y, state = layer(x)
        loss = y.square().sum() + sum(s.square().sum() for s in state.tensors().values())
        results.append([y, *state.tensors().values(), *torch.autograd.grad(loss, list(layer.parameters()))])
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-8, atol=1e-10)


@inside
def test_where_it_does_not_apply():
    def spec(rule: str, d: int = 8, nu: int = 1, attention: bool = False) -> Spec:
        features = Features.named("dpfp", nu, True, True)
        x, gate = torch.zeros(1, 2, 1, d), torch.zeros(1, 2, 1)
        W = torch.zeros(1, 1, features.size(d), d)
        gates = dict.fromkeys(RULES[rule].gate_names, gate)
        z = W[..., 0] if attention else None
        return Spec.of(Inputs(RULES[rule], x, x, x, gates, W, z, features=features))

    def reason(*arguments: Any, **more: Any) -> str | None:
        return why_unfused(spec(*arguments, **more))

    assert reason("delta") is None
    assert reason("gated", attention=True) is None
    assert "D = 384 features" in reason("delta", 64, 3)
    assert reason("sum", 31, 4) is None
    assert "D = 256 features beside M = 33" in reason("sum", 32, 4, attention=True)
    # Factors of heads beyond 32 have no place beside more than 128 of their products; other maps have none.
    assert holds_features(32, 192, 32) and holds_features(256, 256, 32) and not holds_features(33, 132, 32)
    assert "attention normalisation of rule 'delta'" in reason("delta", attention=True)
    with pytest.raises(ValueError, match="outside the family"):
        choose(spec("schlag2021"), "triton")
    assert why_unfused(spec("delta").mapped()) is None
    assert "do not know this feature map" in why_unfused(spec("delta")._replace(features=Features("other")))


@inside
def test_as_a_custom_op():
    """Schema, fake tensors and autograd registration."""
    features = Features.named("dpfp", 1, True, True)
    q, k, v, W = (torch.randn(s, dtype=torch.float64) for s in [(1, 5, 1, 4)] * 2 + [(1, 5, 1, 3), (1, 1, 8, 3)])
    beta = torch.randn(1, 5, 1, dtype=torch.float64)
    for x in (q, k, v, beta, W):
        x.requires_grad_()
    torch.use_deterministic_algorithms(False)
    settings = (True, to_integers(kernels_for(features, 4)), *features[:4])
    arguments = (q, k, v, None, beta, None, W, None, torch.float64, True, *settings)
    torch.library.opcheck(OPERATOR.op, arguments)


@inside
def test_the_layer_compiles_without_graph_breaks():
    layer = FastWeightAttention(8, 2, 4, "gated_delta", "elu").double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    torch.use_deterministic_algorithms(False)
    whole = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x), layer(x)[0])


@inside
def test_shipped_in_float32():
    """The row that heads of 16 with DPFP-3 take, and that of heads of 32 with DPFP-1."""
    for d, nu in ((16, 3), (32, 1)):
        features = Features.named("dpfp", nu, True, True)
        kernels = configuration(features.size(d), d, torch.float32, 99, 1, features)
        assert kernels.key_tile == power_of_two(features.size(d))
        compare(features, d, d, T=20, H=1, kernels=replace(kernels, precision=IEEE, solve=IEEE), dtype=torch.float32)
