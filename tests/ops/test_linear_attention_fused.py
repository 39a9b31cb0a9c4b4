"""The kernels of linear attention: in the interpreter against all weights in float64, and compiled without a GPU."""

from functools import partial

import pytest
import torch

import fastweights as fw
from fastweights.feature_maps import feature_map
from fastweights.layers.cross_attention import FastWeightCrossAttention
from fastweights.ops.features import PLAIN, Features, MapFeatures
from fastweights.ops.gpu import device
from fastweights.ops.gpu.linear_attention import launch
from fastweights.ops.gpu.linear_attention.launch import KEPT, ONE_LAUNCH, PARTS, WEIGHTS, Call, tile_width
from fastweights.ops.gpu.linear_attention.operators import attention
from fastweights.ops.gpu.linear_attention.self_check import compare, refuses, weighted, why_unfused
from fastweights.ops.gpu.self_check import LIMITS
from fastweights.ops.linear_attention import read_memory, write_memory
from tests.layers.kernels import fits, record
from tests.ops.interpreted import inside, outside

pytest.importorskip("triton")

CPU = torch.device("cpu")
ELU, RELU = Features.named("elu"), Features.named("relu")
FAVOR = Features("favor", m=9, inner=0.5)
DPFP1, DPFP2, DPFP3 = (Features.named("dpfp", nu) for nu in (1, 2, 3))


def call_of(way, dtype, R, M, features, normalized=True, masked=True, C=0):
    return Call(way, dtype, R, M, features, normalized, masked, C or tile_width(dtype, features.size(R), M))


@inside
@pytest.mark.parametrize(
    ("tokens", "call"),
    [
        ((9, 13), call_of(WEIGHTS, torch.float64, 40, 20, ELU, C=16)),
        ((13, 2), call_of(WEIGHTS, torch.float64, 10, 3, DPFP2, masked=False, C=16)),
        ((31, 30), call_of(WEIGHTS, torch.float32, 16, 16, DPFP3)),
        ((5, 9), call_of(WEIGHTS, torch.float64, 16, 16, PLAIN, normalized=False, C=16)),
        ((15, 7), call_of(WEIGHTS, torch.float64, 10, 16, FAVOR, C=16)),
        ((57, 57), call_of(ONE_LAUNCH, torch.float64, 16, 16, ELU)),
        ((5, 70), call_of(ONE_LAUNCH, torch.float64, 10, 20, DPFP2)),
        ((40, 3), call_of(ONE_LAUNCH, torch.float32, 40, 40, PLAIN, masked=False)),
        ((5, 37), call_of(ONE_LAUNCH, torch.float64, 10, 5, RELU, normalized=False)),
        ((33, 40), call_of(ONE_LAUNCH, torch.float64, 10, 5, FAVOR)),
        ((5, 150), call_of(PARTS, torch.float64, 20, 16, ELU)),
        ((130, 33), call_of(PARTS, torch.float64, 9, 3, DPFP2, masked=False)),
        ((5, 40), call_of(PARTS, torch.float32, 10, 5, PLAIN, normalized=False)),
        ((34, 7), call_of(PARTS, torch.float32, 10, 5, FAVOR._replace(m=20))),
        ((3, 40), call_of(KEPT, torch.float64, 10, 5, FAVOR)),
        ((5, 37), call_of(KEPT, torch.float64, 10, 5, DPFP2)),
        ((3, 150), call_of(KEPT, torch.float32, 40, 40, ELU)),
        ((17, 2), call_of(KEPT, torch.float64, 10, 5, PLAIN, normalized=False, masked=False)),
    ],
    ids=lambda x: f"{x.way}-{x.features.map}-{str(x.dtype)[6:]}" if isinstance(x, Call) else None,
)
def test_output_and_gradients(monkeypatch, call, tokens):
    """With padding, and with a sequence that is nothing else. More than four tiles of tokens make two parts."""
    monkeypatch.setattr(launch, "LEAST_TILES", 2)
    errors = compare(call, 2, CPU, tokens, mean=3.0)
    limit = 1e-12 if call.dtype == torch.float64 else LIMITS[torch.float32]
    assert all(error < limit for error in errors.values()), errors


def heads(T, S, R=4, M=3, B=2, H=2, dtype=torch.float64):
    """Slices of a projection, as layers have them, and the last keys of the second sequence as padding."""
    q = torch.randn(B, T, H, R, dtype=dtype)
    k, v = torch.randn(B, S, H, R + M, dtype=dtype).split((R, M), -1)
    return q, k, v, torch.arange(S) < torch.tensor([[S], [(S + 1) // 2]])


@inside
@pytest.mark.parametrize(("T", "S"), [(1, 1), (3, 4), (40, 3)])
@pytest.mark.parametrize("normalization", ["attention", None])
def test_is_what_plain_pytorch_computes(T, S, normalization):
    q, k, v, mask = heads(T, S)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert refuses((q, k, v, mask, None), ELU, True) is None
    y = fw.linear_attention(*inputs, mask, normalization=normalization, features=ELU)
    want = weighted(*inputs, mask, ELU, normalization is not None)
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(x, inputs, dy) for x in (y, want))
    torch.testing.assert_close(found, wanted)


@inside
@pytest.mark.parametrize(("T", "S"), [(7, 9), (7, 40)])
def test_padding_leaves_no_trace_and_nan_stays_where_it_is(T, S):
    results = []
    for filler in (0.5, float("nan")):
        torch.manual_seed(0)
        q, k, v, mask = heads(T, S)
        k[~mask], v[~mask] = filler, filler
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        y = fw.linear_attention(*inputs, mask, features=DPFP2)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
        assert not any(x[~mask].any() for x in results[-1][2:])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    q[1, 2, 0, 1] = float("nan")
    spoilt = fw.linear_attention(q, k, v, mask, features=DPFP2)
    assert spoilt[1, 2, 0].isnan().all()
    spoilt[1, 2, 0] = y[1, 2, 0]
    assert torch.equal(spoilt, y)


@inside
def test_gradients_are_differentiated_again_and_come_in_batches():
    q, k, v, mask = heads(2, 3, R=2, M=2, B=1, H=1)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    run = partial(fw.linear_attention, mask=mask[:1], features=ELU)
    assert torch.autograd.gradgradcheck(run, inputs)
    y = run(*inputs)
    weights = torch.randn(3, *y.shape, dtype=y.dtype)
    found = torch.autograd.grad(y, inputs, weights, is_grads_batched=True, retain_graph=True)
    loop = [torch.autograd.grad(y, inputs, w, retain_graph=True) for w in weights]
    torch.testing.assert_close(list(found), [torch.stack(x) for x in zip(*loop, strict=True)])
    plain = torch.func.vmap(torch.func.vjp(run, *(x.detach() for x in inputs))[1])(weights)
    torch.testing.assert_close(list(plain), list(found))


@inside
def test_as_a_custom_op_and_compiled():
    torch.use_deterministic_algorithms(False)
    for S in (3, 40):
        q, k, v, mask = (x[:1] for x in heads(2, S))
        inputs = [x.contiguous().requires_grad_() for x in (q, k, v)]
        torch.library.opcheck(attention, (*inputs, mask, None, "elu", 0, 0, 1.0, True))
        run = partial(fw.linear_attention, mask=mask, features=MapFeatures(feature_map("elu", 4)))
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        ours, theirs = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, run))
        torch.testing.assert_close(ours, theirs)


@inside
@pytest.mark.parametrize("normalization", ["attention", None])
def test_a_state_is_written_once_and_read_by_beams(monkeypatch, normalization):
    used = []
    for name in ("write", "read"):
        kernel = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *x, kernel=kernel: used.append(kernel) or kernel(*x))
    q, k, v, mask = heads(6, 40, dtype=torch.float32)
    state = write_memory(k, v, mask, normalization=normalization, features=DPFP2)
    assert (state.z is None) == (normalization is None)
    want = weighted(q.double(), k.double(), v.double(), mask, DPFP2, normalization is not None).float()
    torch.testing.assert_close(read_memory(q, state, features=DPFP2), want)
    assert len(used) == 2
    # Where gradients are wanted plain PyTorch computes both.
    differentiable = write_memory(k.requires_grad_(), v, mask, normalization=normalization, features=DPFP2)
    torch.testing.assert_close(differentiable.W, state.W)
    torch.testing.assert_close(read_memory(q, differentiable, features=DPFP2), want)
    assert len(used) == 2


@inside
def test_what_does_not_fit_reads_no_foreign_memory():
    """A mask for one of two sequences stands for both; a map that is made for heads of another size is an error."""
    q, k, v, mask = heads(2, 3, dtype=torch.float32)
    state, both = (write_memory(k, v, m, features=ELU) for m in (mask[1:], mask[1:].expand(2, 3)))
    torch.testing.assert_close(state.W, both.W)
    for name in ("favor", "dpfp", "elu"):
        features = MapFeatures(feature_map(name, 3))
        with pytest.raises(ValueError, match=r"for heads of 3, got heads of 4; make it with d_key = 4"):
            fw.linear_attention(q, k, v, features=features)
        with pytest.raises(ValueError, match="for heads of 3"):
            write_memory(k, v, features=features)
        with pytest.raises(ValueError, match="for heads of 3"):
            fw.fast_weight_memory(q, k, v, rule="sum", features=features)


@inside
@pytest.mark.parametrize("phi", ["elu", "favor", "tanh"])
def test_the_layer_takes_them(phi):
    """A map that kernels do not know is computed before them."""
    layer = FastWeightCrossAttention(6, 2, feature_map=phi).double()
    layer.feature_map.redraws = False
    if phi == "tanh":
        # Signed weights may add up to next to nothing.
        layer.query.weight.data.abs_()
        layer.key_value.weight.data.abs_()
    x, sentence = (torch.rand(2, n, 6, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    mask = torch.arange(5) < torch.tensor([[5], [2]])
    y = layer(x, layer.remember(sentence, mask))
    q = layer.query(x).unflatten(-1, (2, 3))
    k, v = layer.key_value(sentence).unflatten(-1, (2, 2, 3)).unbind(2)
    want = layer.out(weighted(q, k, v, mask, layer.features, True).flatten(2))
    torch.testing.assert_close(y, want)
    found, wanted = (torch.autograd.grad(z.square().sum(), (x, sentence)) for z in (y, want))
    torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x, layer.remember(sentence, mask)), want)


def test_refusals(monkeypatch):
    monkeypatch.setattr(device, "unavailable", lambda: None)
    monkeypatch.setattr(device, "interpreted", lambda: True)
    q, v = torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 129)
    assert "got D = 640 and M = 64" in refuses((q, q, q, None, None), Features.named("dpfp", 5), True)
    assert "got D = 64 and M = 129" in refuses((q, q, v, None, None), ELU, True)
    half = (q.half(), q.half(), q.half(), None, None)
    assert "takes float32 and float64 on the CPU, not torch.float16" in refuses(half, ELU, True)
    assert "nothing to compute" in refuses((q[:, :0], q, q, None, None), ELU, True)
    elsewhere = torch.ones(1, 2, dtype=torch.bool, device="meta")
    assert "another tensor on meta" in refuses((q, q, q, elsewhere, None), ELU, True)
    assert "not for heads of 64" in refuses((q, q, q, None, torch.ones(9, 63)), FAVOR, True)
    assert "do not know this feature map" in why_unfused(Features("other"), 64, True)
    assert "do not know this feature map" in why_unfused(Features.named("elu", sum=True), 64, True)
    assert "heads of up to 128 by dpfp, not of 129" in why_unfused(DPFP1, 129, True)
    assert why_unfused(Features.named("elu"), 512, True) is None
    assert "so that it cannot overflow" in why_unfused(FAVOR, 64, False)


def test_parts_cover_all_tokens():
    for heads, blocks, tokens, C in [(8, 1, 4096, 64), (32, 4, 4096, 64), (1, 1, 70, 32), (4096, 8, 100, 64)]:
        count, each = launch.parts_of(heads, blocks, tokens, C)
        assert each % C == 0 and (count - 1) * each < tokens <= count * each


def launches(monkeypatch, call, H=8):
    """What is launched for a call: forward, back, and where it is by parts a state written and read, too."""
    from fastweights.ops.gpu.linear_attention import states, weights

    names = ("attend", "attend_gradients", "write_keys", "write_gradients", "join_parts", "read")
    calls = record(monkeypatch, states, *names, "query_gradients", "key_gradients")
    few = record(monkeypatch, weights, "weigh", "weigh_gradients")
    q, k = (torch.empty(4, 4096, H, call.R, dtype=call.dtype, device="meta") for _ in range(2))
    v = torch.empty(4, 4096, H, call.M, dtype=call.dtype, device="meta")
    mask = torch.empty(4, 4096, dtype=torch.bool, device="meta") if call.masked else None
    vectors = torch.empty(call.features.m, call.R, device="meta") if call.features.m else None
    y, *kept = launch.forward(call, (q, k, v, mask, vectors))
    launch.backward(call, y, (q, k, v, mask, vectors), kept)
    if call.way == PARTS:
        W, z = launch.write(call, k, v, mask, vectors)
        launch.read(call._replace(C=launch.QUERIES), q, vectors, W, z)
    return calls + few


@pytest.mark.slow
@outside
@pytest.mark.parametrize(
    "call",
    [call_of(ONE_LAUNCH, torch.bfloat16, 64, 64, ELU), call_of(WEIGHTS, torch.bfloat16, 64, 64, DPFP2, C=32)],
    ids=["one-launch", "weights"],
)
def test_compiles_for_hopper(monkeypatch, call):
    fits(launches(monkeypatch, call), 2)


@pytest.mark.every_variant
@outside
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("way", [WEIGHTS, ONE_LAUNCH, PARTS])
@pytest.mark.parametrize(
    ("R", "M", "features"),
    [
        *((64, 64, ELU), (16, 16, ELU), (64, 64, DPFP2), (128, 128, DPFP2), (512, 128, PLAIN)),
        (64, 64, Features("favor", m=256, inner=0.35)),
    ],
    ids=["elu-64", "elu-16", "dpfp-256", "dpfp-512", "none-512", "favor-512"],
)
def test_compiles_for_every_architecture(monkeypatch, way, R, M, features, dtype, capability):
    calls = launches(monkeypatch, call_of(way, dtype, R, M, features))
    fits(calls, 9 if way == PARTS else 2, capability)
