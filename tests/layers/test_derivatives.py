"""Derivatives other than `backward` of layers with operators of their own: by finite differences and by a loop.

On a CPU plain PyTorch computes; in the interpreter and on a GPU kernels stand aside where a transform is active.
"""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from fastweights.layers.adaptive import AdaptiveSoftmax
from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.layers.feedforward import FeedForward
from fastweights.ops.gpu import device
from fastweights.ops.losses.label_smoothing import smoothed_nll
from tests.ops.interpreted import inside, outside

pytestmark = [
    # PyTorch's own forward-mode formulas.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    # A loop over the batch of gradients, which is what these operators have.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
B, D, V, CUTOFFS = 5, 3, 14, (4, 9)
TARGETS = torch.tensor([0, 3, 4, 10, 13])


def adaptive_softmax(backend="auto"):
    """Losses of five tokens, as a function of hidden vectors and every parameter."""
    layer = AdaptiveSoftmax(V, D, CUTOFFS, backend=backend).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    names = [name for name, _ in layer.named_parameters()]

    def run(hidden, *values, targets=TARGETS):
        return functional_call(layer, dict(zip(names, values, strict=True)), (hidden, targets))

    return run, (torch.randn(B, D).double(), *(x.detach() for x in layer.parameters()))


def feed_forward(backend="auto"):
    layer = FeedForward(D, 4, backend=backend).double()
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    return run, (torch.randn(B, D).double(), *(x.detach() for x in layer.parameters()))


def label_smoothing(backend="auto"):
    return lambda logits: torch.stack(smoothed_nll(logits, TARGETS, 0.1)), (torch.randn(B, V).double(),)


FUNCTIONS = {f.__name__: f for f in (adaptive_softmax, feed_forward, label_smoothing)}
each_function = pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)


@outside
@each_function
def test_forward_and_batched_derivatives(make):
    run, inputs = make()
    inputs = tuple(x.requires_grad_() for x in inputs)
    everything = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, **everything)
    assert torch.autograd.gradcheck(run, inputs, **everything)


@outside
@each_function
def test_transforms(make):
    run, inputs = make()
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = run(*leaves)
    weights, every = torch.randn_like(y), tuple(range(len(inputs)))
    expected = torch.autograd.grad(y, leaves, weights, retain_graph=True)
    found = grad(lambda *x: (run(*x) * weights).sum(), every)(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(vjp(run, *inputs)[1](weights), expected)
    eye = torch.eye(y.numel()).double().view(-1, *y.shape)
    rows = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in eye]
    jacobians = [torch.stack(x).view(*y.shape, *x[0].shape) for x in zip(*rows, strict=True)]
    torch.testing.assert_close(list(jacrev(run, every)(*inputs)), jacobians)
    batched = torch.autograd.grad(y, leaves, eye, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close([x.view(*y.shape, *x.shape[1:]) for x in batched], jacobians)
    # The same by `vmap` around a backward pass whose forward pass it did not see.
    batched = vmap(lambda w: torch.autograd.grad(y, leaves, w, retain_graph=True))(eye)
    torch.testing.assert_close([x.view(*y.shape, *x.shape[1:]) for x in batched], jacobians)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    along = sum(torch.tensordot(j, t, t.dim()) for j, t in zip(jacobians, tangents, strict=True))
    torch.testing.assert_close(jvp(run, inputs, tangents)[1], along)


def fast_weight():
    layer = FastWeightAttention(4, 2).double()
    return lambda x: layer(x)[0], (torch.randn(1, B, 4).double(),)


@pytest.mark.slow
@outside
@pytest.mark.parametrize("make", [adaptive_softmax, fast_weight])
def test_compiled_transforms(make):
    run, inputs = make()

    def along(*inputs):
        return jvp(run, inputs, inputs)[1], grad(lambda *x: run(*x).sum())(*inputs)

    torch.testing.assert_close(torch.compile(along, backend="eager", fullgraph=True)(*inputs), along(*inputs))


@outside
def test_gradients_of_each_sample():
    """Per-sample gradients by every parameter, where the targets are batched too."""
    run, (hidden, *parameters) = adaptive_softmax()

    def loss(parameters, h, target):
        return run(h[None], *parameters, targets=target[None]).sum()

    found = vmap(grad(loss), (None, 0, 0))(tuple(parameters), hidden, TARGETS)
    for i in range(B):
        leaves = [x.clone().requires_grad_() for x in parameters]
        expected = torch.autograd.grad(run(hidden[i : i + 1], *leaves, targets=TARGETS[i : i + 1]).sum(), leaves)
        torch.testing.assert_close([x[i] for x in found], list(expected))


@outside
def test_no_word_no_number_in_a_transform():
    run, inputs = adaptive_softmax()
    targets = torch.tensor([0, -1, V, 13, 4])
    nll = vmap(lambda h, t: run(h[None], *inputs[1:], targets=t[None])[0])(inputs[0], targets)
    assert nll.isnan().tolist() == [False, True, True, False, False]


@outside
def test_a_tangent_that_would_be_lost_is_refused():
    """The forward pass ran outside of the level, and kept no tangents."""
    run, inputs = adaptive_softmax()
    leaves = [x.requires_grad_() for x in inputs]
    y = run(*leaves)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="run its forward pass inside the dual level"),
    ):
        torch.autograd.grad(y, leaves, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


@outside
def test_kernels_stand_aside_where_a_transform_is_active(monkeypatch):
    monkeypatch.setattr(device, "unavailable", lambda: None)
    monkeypatch.setattr(device, "interpreted", lambda: True)
    reasons = []

    def ask(x):
        reasons.append(device.refuses(x, (torch.float32,), (torch.float32,)))
        return x.sum()

    x = torch.ones(3)
    ask(x)
    grad(ask)(x)
    vmap(ask)(x.view(3, 1))
    jvp(ask, (x,), (x,))
    with forward_ad.dual_level():
        ask(forward_ad.make_dual(x, x))
    ask(x)
    assert [reason is None for reason in reasons] == [True, False, False, False, False, True]
    assert all("transform or forward-mode derivative is active" in reason for reason in reasons if reason)


@inside
@each_function
def test_kernels_take_batched_gradients(make):
    run, inputs = make("fused")
    # Label smoothing is interpreted in float32.
    inputs = [x.float() if make is label_smoothing else x for x in inputs]
    leaves = [x.requires_grad_() for x in inputs]
    y = run(*leaves)
    weights = torch.randn(2, *y.shape, dtype=y.dtype)
    found = torch.autograd.grad(y, leaves, weights, is_grads_batched=True, retain_graph=True)
    loop = [torch.autograd.grad(y, leaves, w, retain_graph=True) for w in weights]
    torch.testing.assert_close(list(found), [torch.stack(x) for x in zip(*loop, strict=True)])


@inside
@each_function
def test_where_a_transform_is_active_kernels_are_not(make):
    run, inputs = make("fused")
    if make is label_smoothing:
        x, t = inputs[0].float(), torch.randn(B, V)
        _, found = jvp(run, (x,), (t,))
        torch.testing.assert_close(found, jvp(run, (x.double(),), (t.double(),))[1].float())
        return
    with pytest.raises(ValueError, match=r"forward-mode derivative is active.*'auto' takes plain PyTorch"):
        jvp(run, inputs, inputs)
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"forward-mode derivative is active.*'auto' takes plain PyTorch"),
    ):
        run(forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])


@inside
@pytest.mark.parametrize("make", [adaptive_softmax, feed_forward])
def test_kernels_refuse_a_tangent_that_would_be_lost(make):
    run, inputs = make("fused")
    leaves = [x.requires_grad_() for x in inputs]
    y = run(*leaves)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="inside the dual level"):
        torch.autograd.grad(y, leaves, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))
