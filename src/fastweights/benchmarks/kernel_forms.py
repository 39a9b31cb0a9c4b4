"""Times of what is around the recurrence: feature maps inside the kernels, whole layers, and decoding."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import fastweights as fw
from fastweights.benchmarks.gpu_timing import Forward, eager_and_graph, measure, short
from fastweights.ops.features import Features
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.state import FastWeightState

# (B, T, H, d, M) of raw heads, as in the paper's small and medium language models.
HEADS = {"paper small": (96, 256, 8, 16, 16), "paper medium": (56, 384, 8, 32, 32)}
# How q, k, v and the gate come: each for itself; slices of one projection, all heads of q first; or head by head.
LAYOUTS = ("apart", "blocks", "by head")
LAYERS, BATCHES, CACHED = 16, (1, 256), 4096


def raw_inputs(shape: tuple[int, int, int, int, int], dtype: torch.dtype, layout: str) -> list[Tensor]:
    """q, k, v and the logit of beta, as leaves where they are apart, else as slices of a leaf."""
    B, T, H, d, M = shape
    sizes = [d, d, M, 1]
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", generator=generator).to(dtype).requires_grad_()

    if layout == "apart":
        return [normal(B, T, H, d), normal(B, T, H, d), normal(B, T, H, M), normal(B, T, H)]
    if layout == "by head":
        q, k, v, beta = normal(B, T, H, sum(sizes)).split(sizes, -1)
    else:
        parts = normal(B, T, H * sum(sizes)).split([H * size for size in sizes], -1)
        q, k, v, beta = (x.unflatten(-1, (H, -1)) for x in parts)
    return [q, k, v, beta.squeeze(-1)]


def fused(
    name: str, dtype: torch.dtype, features: Features, layout: str, inside: bool, budget_ms: float
) -> dict[str, Any]:
    """Forward and backward from raw heads, with the map `inside` the kernels or before them."""

    def make() -> tuple[Forward, Any]:
        tensors = raw_inputs(HEADS[name], dtype, layout)
        # Gradients of the slices, not of what they were cut from: that takes the same for everybody.
        q, k, v, beta = [x.detach().requires_grad_() for x in tensors]

        def within() -> Tensor:
            return fast_weight_memory(q, k, v, beta=beta, features=features, backend="triton")[0]

        def before() -> Tensor:
            gate = beta.float().sigmoid()
            return fast_weight_memory(features.of(q), features.of(k), v, beta=gate, backend="triton")[0]

        return within if inside else before, [q, k, v, beta]

    return measure(make, budget_ms)


def fused_error(name: str, dtype: torch.dtype, features: Features) -> float:
    """The worst relative error of output and gradients against float64, with fewer tokens."""
    _, _, H, d, M = HEADS[name]
    tensors = [x.detach() for x in raw_inputs((4, 100, H, d, M), dtype, "by head")]
    dy = torch.randn(4, 100, H, M, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    found = []
    for exact in (False, True):
        leaves = [(x.double() if exact else x).requires_grad_() for x in tensors]
        q, k, v, beta = leaves
        if exact:
            gate = features.gate(beta)
            y = fast_weight_memory(features.of(q), features.of(k), v, beta=gate, backend="chunked")[0]
        else:
            y = fast_weight_memory(q, k, v, beta=beta, features=features, backend="triton")[0]
        found.append([y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True))


def layer(name: str, phi: str, nu: int, budget_ms: float) -> dict[str, Any]:
    """A whole `FastWeightAttention` in bfloat16, all gradients."""
    B, T, H, d, _ = HEADS[name]
    options = {"nu": nu} if nu else {}
    module = fw.FastWeightAttention(H * d, H, d, "delta", phi, feature_map_options=options)
    module = module.to("cuda", torch.bfloat16)
    x = torch.randn(B, T, H * d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return measure(lambda: (lambda: module(x)[0], [x, *module.parameters()]), budget_ms)


Step = Callable[[], object]


def _token(batch: int, H: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[FastWeightState]]:
    """q, k, v and the logit of beta of one token, and the memories of `LAYERS` layers."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    q, k, v = (normal(batch, 1, H, d).bfloat16() for _ in range(3))
    # Keys of length 1, so that the memories that are written again and again stay bounded.
    k = torch.nn.functional.normalize(k, dim=-1)
    return q, k, v, normal(batch, 1, H).bfloat16(), [FastWeightState(normal(batch, H, d, d)) for _ in range(LAYERS)]


def decode(batch: int, budget_ms: float, H: int = 8, d: int = 32) -> dict[str, dict[str, Any]]:
    """One token through the memories of `LAYERS` layers, and through attention over a cache of each layer's own."""
    features = Features.named("elu", sum=True, logits=True)
    q, k, v, beta, states = _token(batch, H, d)

    def ours(in_place: bool, given: Features) -> Step:
        def step() -> None:
            gate = beta if given.logits else opened
            for state in states:
                fast_weight_memory(q, k, v, beta=gate, state=state, features=given, in_place=in_place, backend="triton")

        return step

    opened = beta.float().sigmoid()
    caches = [torch.randn(2, batch, H, CACHED, d, device="cuda", dtype=q.dtype) for _ in range(LAYERS)]
    query = q.transpose(1, 2)

    def attention() -> None:
        for keys, values in caches:
            torch.nn.functional.scaled_dot_product_attention(query, keys, values)

    return _times(
        {
            "fastweights in place, from raw heads": ours(True, features),
            "fastweights in place": ours(True, Features()),
            "fastweights": ours(False, Features()),
            f"attention over {CACHED} tokens": attention,
        },
        budget_ms,
    )


def _times(steps: dict[str, Step], budget_ms: float) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        try:
            with torch.no_grad():
                found[name] = eager_and_graph({"token": step}, budget_ms)
        except Exception as error:
            found[name] = {"failure": short(error)}
    return found


def has_fla() -> bool:
    """Whether there is fla to compare with."""
    return find_spec("fla") is not None


def decode_fla(batch: int, budget_ms: float, H: int = 8, d: int = 32) -> dict[str, Any]:
    """The same token through as many of fla's recurrent kernels."""
    from fla.ops.delta_rule import fused_recurrent_delta_rule

    q, k, v, beta, states = _token(batch, H, d)
    beta = beta.sigmoid()

    def step() -> None:
        for state in states:
            fused_recurrent_delta_rule(q, k, v, beta, scale=1.0, initial_state=state.W, output_final_state=True)

    with torch.no_grad():
        return eager_and_graph({"token": step}, budget_ms)
