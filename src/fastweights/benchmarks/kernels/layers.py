"""Times of the kernels where models use them: from raw heads with a feature map, in whole layers, and in decoding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastweights as fw
from fastweights.benchmarks.kernels.rows import Shape, inputs
from fastweights.benchmarks.timing import attempt, eager_and_graph, measure
from fastweights.ops.features import Features
from fastweights.ops.gpu.self_check import relative_errors
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.state import FastWeightState

# (B, T, H, d, M) of raw heads, as in the paper's small and medium language models.
HEADS = {"paper small": (96, 256, 8, 16, 16), "paper medium": (56, 384, 8, 32, 32)}
# Layers and batch sizes of decoding, and the tokens that attention has in its cache.
LAYERS, BATCHES, CACHED = 16, (1, 256), 4096


def raw_inputs(shape: Shape, dtype: torch.dtype, sliced: bool = False) -> list[Tensor]:
    """Return q, k, v and the logit of beta, which need gradients, or `sliced` from one projection, which do not."""
    B, T, H, d, M = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", generator=generator).to(dtype)

    if sliced:
        q, k, v, beta = normal(B, T, H, 2 * d + M + 1).split([d, d, M, 1], -1)
        return [q, k, v, beta.squeeze(-1)]
    sizes = ((B, T, H, d), (B, T, H, d), (B, T, H, M), (B, T, H))
    return [normal(*size).requires_grad_() for size in sizes]


def fused(name: str, dtype: torch.dtype, features: Features, inside: bool, budget_ms: float) -> dict[str, Any]:
    """Time forward and backward from raw heads, with the map `inside` the kernels or before them."""
    q, k, v, beta = leaves = raw_inputs(HEADS[name], dtype)

    def within() -> Tensor:
        return fast_weight_memory(q, k, v, beta=beta, features=features, backend="triton")[0]

    def before() -> Tensor:
        gate = beta.float().sigmoid()
        return fast_weight_memory(features.of(q), features.of(k), v, beta=gate, backend="triton")[0]

    return measure(within if inside else before, leaves, budget_ms)


def fused_error(name: str, dtype: torch.dtype, features: Features) -> float:
    """Return the worst relative error of output and gradients against float64, with fewer tokens."""
    _, _, H, d, M = HEADS[name]
    tensors = raw_inputs((4, 100, H, d, M), dtype, sliced=True)
    dy = torch.randn(4, 100, H, M, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    results = []
    for exact in (False, True):
        q, k, v, beta = leaves = [(x.double() if exact else x).requires_grad_() for x in tensors]
        if exact:
            gate = features.gate(beta)
            y = fast_weight_memory(features.of(q), features.of(k), v, beta=gate, backend="chunked")[0]
        else:
            y = fast_weight_memory(q, k, v, beta=beta, features=features, backend="triton")[0]
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    return max(relative_errors(("y", "q", "k", "v", "beta"), *results).values())


def layer(name: str, phi: str, nu: int, budget_ms: float) -> dict[str, Any]:
    """Time a whole `FastWeightAttention` in bfloat16, all gradients."""
    B, T, H, d, _ = HEADS[name]
    options = {"nu": nu} if nu else {}
    module = fw.FastWeightAttention(H * d, H, d, "delta", phi, feature_map_options=options)
    module = module.to("cuda", torch.bfloat16)
    x = torch.randn(B, T, H * d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return measure(lambda: module(x)[0], [x, *module.parameters()], budget_ms)


Step = Callable[[], object]


def _token(batch: int, H: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[FastWeightState]]:
    """Return q, k, v and the logit of beta of one token, and the memories of `LAYERS` layers.

    Keys have length 1, so that the memories that are written again and again stay bounded.
    """
    q, k, v, beta = inputs((batch, 1, H, d, d), torch.bfloat16)
    states = [FastWeightState(torch.randn(batch, H, d, d, device="cuda")) for _ in range(LAYERS)]
    return q, k, v, beta.bfloat16(), states


def decode(batch: int, budget_ms: float, H: int = 8, d: int = 32) -> dict[str, dict[str, Any]]:
    """Time one token through the memories of `LAYERS` layers, and through attention over a cache in each layer."""
    features = Features.named("elu", sum=True, logits=True)
    q, k, v, beta, states = _token(batch, H, d)

    gate = beta.float().sigmoid()

    def ours(beta: Tensor, **options: Any) -> Step:
        def step() -> None:
            for state in states:
                fast_weight_memory(q, k, v, beta=beta, state=state, backend="triton", **options)

        return step

    caches = [torch.randn(2, batch, H, CACHED, d, device="cuda", dtype=q.dtype) for _ in range(LAYERS)]
    query = q.transpose(1, 2)

    def attention() -> None:
        for keys, values in caches:
            torch.nn.functional.scaled_dot_product_attention(query, keys, values)

    steps = {
        "fastweights in place, from raw heads": ours(beta, features=features, in_place=True),
        "fastweights in place": ours(gate, in_place=True),
        "fastweights": ours(gate),
        f"attention over {CACHED} tokens": attention,
    }
    with torch.no_grad():
        return {name: attempt(eager_and_graph, {"token": step}, budget_ms) for name, step in steps.items()}


def decode_fla(batch: int, budget_ms: float, H: int = 8, d: int = 32) -> dict[str, Any]:
    """Time the same token through as many calls of fla's recurrent kernel."""
    from fla.ops.delta_rule import fused_recurrent_delta_rule

    q, k, v, beta, states = _token(batch, H, d)
    beta = beta.sigmoid()

    def step() -> None:
        for state in states:
            fused_recurrent_delta_rule(q, k, v, beta, scale=1.0, initial_state=state.W, output_final_state=True)

    with torch.no_grad():
        return eager_and_graph({"token": step}, budget_ms)
