"""The chunked backend as a citizen of PyTorch: opcheck, torch.compile, autocast, DDP."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing import spawn
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fastweights as fw
from fastweights.ops.chunked import OPERATOR
from fastweights.ops.eager import is_eager
from fastweights.ops.operator import number_of_chunks
from tests.ops.calls import FAMILY, gradients, random_call, relative_error


def op_inputs(rule, packed, dtype=torch.float32, grad=False):
    call = random_call(rule, B=1 if packed else 2, T=9, H=2, D=3, M=2, dtype=dtype)
    gates = fw.ops.rules.RULES[rule].coefficients(**{n: g.float() for n, g in call.gates.items()})
    W = torch.rand(2, 2, 3, 2)
    bounds = torch.tensor([0, 4, 9]) if packed else None
    floats = [call.q, call.k, call.v, *gates, W]
    floats = [x if x is None else x.detach().clone().requires_grad_(grad) for x in floats]
    return (*floats, bounds, torch.float32, True, 4, False)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rule", FAMILY)
def test_opcheck(rule, packed):
    inputs = op_inputs(rule, packed, grad=True)
    torch.library.opcheck(OPERATOR.op, inputs)
    y, W, before = OPERATOR.op(*(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs))
    q, k, v, a, e, w = (x if x is None else x.detach() for x in inputs[:6])
    torch.library.opcheck(OPERATOR.backward_op, (y, W, q, k, v, a, e, w, before, inputs[7], 4, False))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_graph_breaks(packed):
    call = random_call("gated_delta", "attention", 1 if packed else 2, 40, 2, 4, 3)
    bounds = torch.tensor([0, 7, 40]) if packed else None
    if packed:
        call.state = random_call("gated_delta", "attention", 2, 1, 2, 4, 3, seed=3).state
    call = call.requiring_grad()

    def function(*inputs):
        return call.with_inputs(inputs).run("chunked", cu_seqlens=bounds)

    eager = function(*call.inputs())
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*call.inputs())
    ours = [*compiled, *gradients(compiled, call.inputs())]
    assert relative_error(ours, [*eager, *gradients(eager, call.inputs())]) < 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from inside torch, on its first compilation
def test_layer_compiles_with_inductor():
    layer = fw.FastWeightAttention(16, 2, feature_map="dpfp")
    x = torch.randn(2, 40, 16, requires_grad=True)
    y, state = torch.compile(layer, fullgraph=True)(x)
    expected, expected_state = layer(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(state.W, expected_state.W)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x) for out in (y, expected)))


def test_autocast_runs_in_its_dtype_and_keeps_the_state_wide():
    layer = fw.FastWeightAttention(16, 2)
    x = torch.randn(2, 40, 16, requires_grad=True)
    expected, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        y, state = layer(x, state.detach())
    assert state.W.dtype == torch.float32
    (grad,) = torch.autograd.grad(y.float().sum(), x)
    assert grad.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error([layer(x)[0]], [expected]) < 2e-2


def test_no_second_backward_through_chunks():
    """The chunked backward is not differentiable; asking must fail, not return zeros."""
    call = random_call("delta").requiring_grad()
    (dq,) = torch.autograd.grad(call.run("chunked")[0].sum(), call.q, create_graph=True)
    # Also beside a term that has a gradient, and by whichever input: nothing must be left out.
    for x in call.inputs():
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(dq.sum() + x.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        (dq.sum() + call.q.sum()).backward()


def _train_one_step(rank, store, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = torch.nn.parallel.DistributedDataParallel(fw.FastWeightAttention(8, 2))
    x = torch.randn(4, 20, 8, generator=torch.Generator().manual_seed(7))
    layer(x[2 * rank : 2 * rank + 2])[0].square().mean().backward()
    torch.save([p.grad for p in layer.parameters()], f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ddp_averages_the_gradients(tmp_path):
    spawn(_train_one_step, (tmp_path / "store", tmp_path), nprocs=2)
    torch.manual_seed(0)
    layer = fw.FastWeightAttention(8, 2)
    x = torch.randn(4, 20, 8, generator=torch.Generator().manual_seed(7))
    layer(x)[0].square().mean().backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert relative_error(found, [p.grad for p in layer.parameters()]) < 1e-5


def test_states_are_kept_for_as_many_chunks_as_there_can_be():
    q = torch.empty(3, 9, 2, 4)
    assert [number_of_chunks(q, chunk, None) for chunk in (2, 3, 4, 9, 10)] == [15, 9, 9, 3, 3]
    # Where every sequence has a little more than whole chunks, the bound for packed ones is their number.
    lengths, chunk = [5, 1, 9], 4
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = number_of_chunks(torch.empty(1, sum(lengths), 2, 4), chunk, bounds)
    assert packed == sum(-(-n // chunk) for n in lengths)


def lazily_negated(x):
    """-x as a view that is negated when it is read, as the imaginary part of a conjugate is."""
    return torch.complex(torch.zeros_like(x), x).conj().imag


@pytest.mark.parametrize("which", ["q", "k", "v", "beta", "W", "dy"])
@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_views_with_a_lazy_minus_sign(backend, which):
    """Who reads memory by its address does not see the sign."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(1, 9, 2, 4, dtype=torch.float64) for name in ("q", "k", "v", "dy")}
    tensors |= {"beta": torch.rand(1, 9, 2, dtype=torch.float64), "W": torch.randn(1, 2, 4, 4, dtype=torch.float64)}
    found = []
    for minus in (lazily_negated, torch.neg):
        given = tensors | {which: minus(tensors[which])}
        assert given[which].is_neg() == (minus is lazily_negated)
        q, k, v, beta, W = (given[name].requires_grad_() for name in ("q", "k", "v", "beta", "W"))
        y, end = fw.fast_weight_memory(q, k, v, beta=beta, state=fw.FastWeightState(W), backend=backend)
        found.append([y, end.W, *torch.autograd.grad(y, (q, k, v, beta, W), given["dy"])])
    assert relative_error(*found) < 1e-12


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_zeros_without_memory(backend):
    q, k, v = (torch.randn(1, 9, 2, 4, requires_grad=True) for _ in range(3))
    y, _ = fw.fast_weight_memory(q, k, v, rule="sum", backend=backend)
    for x in torch.autograd.grad(y, (q, k, v), torch._efficientzerotensor(y.shape)):
        assert not x.any()
    y, _ = fw.fast_weight_memory(
        q.detach(), k.detach(), torch._efficientzerotensor(v.shape), rule="sum", backend=backend
    )
    assert not y.any()


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_traced_before_dispatch(backend):
    """One op, not what it does inside with memory that is there while tracing."""
    call = random_call("delta")
    traced = make_fx(lambda *x: call.with_inputs(x).run(backend), pre_dispatch=True)(*call.inputs())
    assert f"fastweights.{backend}" in traced.code
    other = random_call("delta", seed=1)
    assert relative_error(traced(*other.inputs()), other.run(backend)) < 1e-12


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_a_default_device_does_not_matter(backend):
    call = random_call("delta", B=1, T=9)
    call.state = tuple(x.repeat(2, *[1] * (x.dim() - 1)) for x in call.state)
    bounds = torch.tensor([0, 4, 9])
    with torch.device("meta"):
        found = call.run(backend, cu_seqlens=bounds)
    assert relative_error(found, call.run(backend, cu_seqlens=bounds)) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_who_looks_on_is_seen():
    """Each alone keeps kernels from being called past it; a default device does not look."""
    x, seen = torch.ones(2), []

    def look(y):
        seen.append(is_eager(x))
        return y + 1

    for mode in (FlopCounterMode(display=False), BaseTorchFunctionMode(), forward_ad.dual_level()):
        with mode:
            look(x)
    torch.func.vmap(look)(x)
    torch.jit.trace(look, x, check_trace=False)
    assert seen == [False] * 5
    with torch.device("cpu"):
        assert is_eager(x)
