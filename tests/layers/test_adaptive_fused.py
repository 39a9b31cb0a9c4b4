"""The softmax kernels: in Triton's interpreter against the dense path and torch's own, and compiled without a GPU.

The interpreter has to be chosen before Triton is first imported, so its tests run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastweights.layers import adaptive_check, adaptive_fused
from fastweights.layers.adaptive import AdaptiveSoftmax
from fastweights.layers.adaptive_check import compare, refuses
from fastweights.layers.adaptive_fused import TABLE, Config, configuration, fused_nll

triton = pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
outside = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
CPU, V, D, CUTOFFS = torch.device("cpu"), 61, 6, (9, 17, 50)
# As shipped, except that a softmax of so few rows is split too.
SMALL = Config(16, 16, 4, 1, 16, 16, 4, 1, parts=4, least=16)


@pytest.mark.slow
@outside
def test_in_the_interpreter():
    """Runs the rest of this file with the interpreter."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout=280", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout


def agree(dtype=torch.float64, d=D, tokens=19, words=V, cutoffs=CUTOFFS, targets=None, config=SMALL):
    errors = compare(dtype, dtype, d, CPU, tokens, words, cutoffs, targets, config)
    assert all(error < (1e-12 if dtype == torch.float64 else 1e-5) for error in errors.values()), errors


@inside
@pytest.mark.parametrize("cutoffs", [CUTOFFS, (), (1, 2, 60)], ids=str)
def test_softmaxes(cutoffs):
    agree(cutoffs=cutoffs)


@inside
@pytest.mark.parametrize("d", [1, 16, 33])
def test_sizes(d):
    agree(d=d, tokens=7)


@inside
@pytest.mark.parametrize("tokens", [1, 16])
def test_tokens(tokens):
    agree(tokens=tokens)


@inside
@pytest.mark.parametrize(
    "words",
    [range(9), range(17, 50), range(50, 61), [0, 8, 9, 16, 17, 49, 50, 60], [30], [60]],
    ids=["head", "largest", "last", "borders", "one word", "last word"],
)
def test_wherever_the_targets_fall(words):
    targets = torch.tensor([words[i % len(words)] for i in range(18)])
    agree(tokens=18, targets=targets[torch.randperm(18)])


@inside
@pytest.mark.parametrize("parts", [1, 64])
def test_parts(parts):
    """Results do not depend on how a softmax is split, nor on tokens that come in many tiles."""
    agree(tokens=34, words=150, cutoffs=(40, 70), config=SMALL._replace(parts=parts, least=16))


@inside
def test_as_shipped_for_float32():
    agree(torch.float32, d=20, tokens=20, words=80, config=configuration(torch.float32, 20))


def layer_of(backend, dtype=torch.float64):
    torch.manual_seed(0)
    layer = AdaptiveSoftmax(V, D, CUTOFFS, backend=backend).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@inside
def test_gradcheck(monkeypatch):
    monkeypatch.setitem(TABLE, torch.float64, {256: SMALL})
    layer, hidden = layer_of("fused"), torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 8, 9, 20, 60])
    parameters = dict(layer.named_parameters())

    def loss(hidden, cluster_weight, bias):
        replaced = parameters | {"cluster_weight": cluster_weight, "bias": bias}
        return torch.func.functional_call(layer, replaced, (hidden, targets))

    checked = (hidden, layer.cluster_weight, layer.bias)
    assert torch.autograd.gradcheck(loss, checked, fast_mode=True)


@inside
def test_the_layer_takes_it():
    dense, fused = layer_of("dense"), layer_of("fused")
    hidden, targets = torch.randn(3, 7, D, dtype=torch.float64), torch.randint(V, (3, 7))
    torch.testing.assert_close(fused(hidden, targets), dense(hidden, targets))
    with torch.no_grad():
        torch.testing.assert_close(fused(hidden, targets), dense(hidden, targets))
    full = -fused.log_prob(hidden).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(fused(hidden, targets), full)


@inside
def test_no_word_no_number():
    layer = layer_of("fused")
    nll = layer(torch.randn(4, D, dtype=torch.float64), torch.tensor([3, -1, V, 60]))
    assert nll.isnan().tolist() == [False, True, True, False]


@inside
def test_very_large_logits():
    """No overflow where every probability is 0 or 1."""
    layer = layer_of("fused", torch.float32)
    with torch.no_grad():
        layer.weight.mul_(1e4)
        hidden, targets = torch.randn(9, D), torch.randint(V, (9,))
        layer.backend, fused = "dense", layer(hidden, targets)
        torch.testing.assert_close(fused, layer(hidden, targets))


@inside
def test_as_a_custom_op():
    torch.use_deterministic_algorithms(False)
    layer, hidden = layer_of("fused"), torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    weights = (layer.weight, layer.bias, layer.cluster_weight, layer.cluster_bias)
    arguments = (hidden, *weights, torch.tensor([0, 8, 9, 20, 60]), list(CUTOFFS), True, list(SMALL), False)
    torch.library.opcheck(fused_nll, arguments)


@inside
def test_compiles_without_graph_breaks():
    torch.use_deterministic_algorithms(False)
    layer, hidden = layer_of("fused"), torch.randn(8, D, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(V, (8,))
    leaves = [hidden, *layer.parameters()]
    losses = [run(hidden, targets) for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager"))]
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in losses), strict=True):
        torch.testing.assert_close(ours, theirs)


@inside
def test_refuses_what_the_interpreter_gets_wrong():
    hidden, weight = torch.zeros(2, D), torch.zeros(V, D)
    assert refuses(hidden, weight) is None
    assert "not torch.bfloat16" in refuses(hidden.bfloat16(), weight)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu():
    hidden, targets = torch.randn(2, D, dtype=torch.float64), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="'fused', but there is no CUDA device"):
        layer_of("fused")(hidden, targets)
    torch.testing.assert_close(layer_of("auto")(hidden, targets), layer_of("dense")(hidden, targets))
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        AdaptiveSoftmax(V, D, backend="fast")


class Recorder:
    """Stands where a kernel stands and notes what it is called with."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append((self.kernel, arguments, options))


def launches(monkeypatch, dtype, d, config):
    """What is launched for the paper's vocabulary and batch."""
    from fastweights.layers import adaptive_kernels

    calls = []
    for name in ("arrange", "partial_softmax", "finish", "weight_gradient"):
        monkeypatch.setattr(adaptive_kernels, name, Recorder(getattr(adaptive_kernels, name), calls))

    def tensor(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    N, words, cutoffs = 24_576, 267_735, [20_000, 40_000, 200_000]
    weights = tensor(words, d), tensor(words), tensor(3, d), tensor(3)
    inputs = (tensor(N, d, dtype=dtype), *weights, tensor(N, dtype=torch.int64), cutoffs, True, list(config), True)
    found = adaptive_fused.fused_nll._init_fn(*inputs)
    adaptive_fused.fused_nll_backward._init_fn(tensor(N), *found[2:], cutoffs, torch.float32, list(config))
    return calls


ROWS = [
    pytest.param(dtype, d, config, id=f"{str(dtype)[6:]}-{d}")
    for dtype, rows in TABLE.items()
    if dtype != torch.float64
    for d, config in rows.items()
]


@pytest.mark.slow
@outside
@pytest.mark.parametrize(("dtype", "d", "config"), ROWS)
def test_compiles_for_hopper(monkeypatch, dtype, d, config):
    from tests.ops.test_triton_aot import SHARED, build

    calls = launches(monkeypatch, dtype, d, config)
    assert len(calls) == 4
    for kernel, arguments, options in calls:
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        positional = [named.pop(name) for name in kernel.arg_names]
        built = build((kernel, positional, {"num_warps": 4, "num_stages": 3, **named}), 90)
        assert built.metadata.shared <= SHARED[90], kernel.__name__
        assert "cubin" in built.asm


def test_a_wrong_kernel_is_found_out(monkeypatch):
    """On a GPU, where it runs before the kernels do."""
    off = {"nll": 1e-4, "weight": 0.3, "bias": float("nan")}
    monkeypatch.setattr(adaptive_check, "compare", lambda *_, **__: off)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.warns(UserWarning, match="will not be used here"):
        reason = adaptive_check._verdict.__wrapped__(torch.bfloat16, torch.float32, 128, CPU)
    assert "wrong on this machine: off weight by 3e-01, bias by nan" in reason
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the call once before"):
        adaptive_check._verdict.__wrapped__(torch.bfloat16, torch.float32, 128, CPU)
