"""Checks of the memory's kernels: a small problem of each signature, compared with `ops.chunked` in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import chunked
from fastweights.ops.family import LOG_OF_ZERO
from fastweights.ops.features import Features
from fastweights.ops.gpu.memory.signatures import Signature, StepSignature, WalkSignature
from fastweights.ops.gpu.memory.variants import (
    FEW,
    LEAST_CHUNKS,
    LEAST_GROUPS,
    LONG,
    TABLE,
    ChunkedWalk,
    RecurrentWalk,
    configuration,
    per_key_candidates,
    plain_rows,
)
from fastweights.ops.gpu.self_check import LIMITS, Check, on_stream, relative_errors

SOURCE = Path(__file__).parent


def refusal(signature: Signature, heads: int, device: torch.device) -> str | None:
    """Say why the kernels of this signature must not be used on `device`; checks them where nobody did before."""
    return check_of(signature, heads).refusal(device)


@cache
def check_of(signature: Signature, heads: int) -> Check:
    """Return the check of the kernels of one signature, with as many heads as the call that asks first."""
    by_token = isinstance(signature, WalkSignature) and isinstance(signature.variant, RecurrentWalk)
    instead = "kernels that walk by chunks" if by_token else "the backend 'chunked'"

    def compare(device: torch.device) -> dict[str, float]:
        if isinstance(signature, StepSignature):
            return _compare_step(signature, heads, device)
        return _compare(signature, heads, device)

    name, alternative = f"the kernels for {signature}", f"'auto' takes {instead} instead"
    return Check(signature.key, name, SOURCE, signature.dtype, compare, instead=alternative)


def _walks(*arguments: Any) -> Any:
    from fastweights.ops.gpu.memory.grouped import plan_walks

    return plan_walks(*arguments)


def _compare(signature: WalkSignature, heads: int, device: torch.device) -> dict[str, float]:
    """Return ||ours - float64|| / ||float64|| of outputs and gradients, over chunks of which the last is partial."""
    generator = torch.Generator(device).manual_seed(0)
    C, H, D, M = signature.variant.chunk, heads, signature.D, signature.M
    B, T = (1 if signature.packed else 2), 3 * C + 5
    if isinstance(signature.variant, ChunkedWalk) and signature.variant.groups and not signature.packed:
        # As few chunks as make groups of any configuration.
        T = (LEAST_GROUPS * LEAST_CHUNKS - 1) * C + 5
    wide = torch.promote_types(signature.dtype, torch.float32)

    def normal(*shape: int, dtype: torch.dtype = signature.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def uniform(there: bool) -> Tensor | None:
        return torch.rand(B, T, H, generator=generator, device=device, dtype=wide) if there else None

    q, v = normal(B, T, H, D), normal(B, T, H, M)
    k = normal(B, T, H, D)
    if not signature.features.sum:
        k = torch.nn.functional.normalize(k.float(), dim=-1).to(signature.dtype)
    a, e, w = uniform(signature.decay), uniform(signature.erase), uniform(signature.write)
    if a is not None:
        shut = torch.tensor([C // 2, 2 * C], device=device)
        if signature.per_key:
            rates = torch.rand(B, T, H, D, generator=generator, device=device, dtype=wide)
            # Chunks in which everything may be gone, and some that fade slowly, for which there is a faster way.
            a = (-5 * rates**4).index_fill(1, shut[:1], LOG_OF_ZERO)
            a[:, 2 * C + 1 :] *= 0.02
        else:
            a = (0.8 + 0.2 * a).index_fill(1, shut, 0.0)
    if signature.features.logits:
        a, e, w = (None if gate is None else gate.logit(1e-4) for gate in (a, e, w))
    # Also a sequence without tokens, and one that ends inside a chunk.
    bounds = torch.tensor([0, C + 3, C + 3, T], device=device) if signature.packed else None
    W = 0.3 * normal(3 if signature.packed else B, H, signature.features.size(D), M, dtype=wide)
    dy, dW = normal(B, T, H, M), normal(*W.shape, dtype=wide)

    tokens = (q, k, v, a, e, w)
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    # What loading float64 products takes the first time, loading Triton and compiling take too: both at once.
    with ThreadPoolExecutor(1) as pool:
        exact = pool.submit(on_stream, stream, _exact, signature, (*tokens, W), bounds, dy, dW)
        how = (signature.dtype, True, signature.tied, signature.variant, signature.features)
        walks = _walks(tokens, bounds, *how)
        y, W_end, *kept = walks.forward(tokens, W, bounds, True)
        grads = walks.backward(tokens, dy, dW, kept, bounds, True)
        want = exact.result()
    ours = [y, W_end, *(grad for grad in grads if grad is not None)]
    gates = [name for name, gate in (("decay", a), ("erase", e), ("write", w)) if gate is not None]
    names = ["y", "W", "dq", "dk", "dv", *(f"d{name}" for name in gates), "dW"]
    return relative_errors(names, ours, want)


def _step_plan(*arguments: Any) -> Callable[..., Any]:
    from fastweights.ops.gpu.memory.step import step_plan

    return step_plan(*arguments)


def _compare_step(signature: StepSignature, heads: int, device: torch.device) -> dict[str, float]:
    """Return ||ours - float64|| / ||float64|| of y, W and z after one token, in place and not."""
    generator = torch.Generator(device).manual_seed(0)
    B, H, D, M, features = 3, heads, signature.D, signature.M, signature.features
    wide = torch.promote_types(signature.dtype, torch.float32)

    def uniform(*shape: int, dtype: torch.dtype = signature.dtype) -> Tensor:
        return torch.rand(shape, generator=generator, device=device).to(dtype)

    def gate(there: bool) -> Tensor | None:
        x = uniform(B, 1, H, dtype=wide) if there else None
        return x.logit(1e-4) if x is not None and features.logits else x

    # Positive keys and sums, so that nothing is divided by what cancels.
    q, k, v = uniform(B, 1, H, D), uniform(B, 1, H, D), uniform(B, 1, H, M)
    a, e, w = gate(signature.decay), gate(signature.erase), gate(signature.write)
    if signature.per_key:
        a = uniform(B, 1, H, D, dtype=wide).log()
    W = uniform(B, H, features.size(D), M, dtype=wide)
    z = 0.1 + uniform(B, H, features.size(D), dtype=wide) if signature.normalized else None
    plan = _step_plan(q, k, v, (a, e, w), signature.tied, signature.normalized, features)
    ours: list[Tensor] = []
    for in_place in (False, True):
        ours += [x for x in plan(q, k, v, (a, e, w), W.clone(), z, in_place) if x is not None]

    exact = {name: x.double() for name, x in (("a", a), ("e", e), ("w", w)) if x is not None}
    if signature.per_key:
        exact["a"] = exact["a"].exp()
    gates = {name: features.gate(x) for name, x in exact.items()}
    want = _exact_step(signature, features.of(q.double()), features.of(k.double()), v.double(), gates, W.double(), z)
    names = ["y", "W", *(["z"] if signature.normalized else [])]
    names += [f"{name} in place" for name in names]
    return relative_errors(names, ours, want * 2)


def _exact_step(
    signature: StepSignature, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], W: Tensor, z: Tensor | None
) -> list[Tensor]:
    """Compute the family's equations for one token, with attention normalisation as in Eqs. 18-19 and 26-28."""
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    one = torch.ones_like(v[..., :1])
    # (B, H, 1), or (B, H, D) for decays per key.
    a, e, w = (_without_time(gates[name]) if name in gates else None for name in "aew")
    w = e if signature.tied else w
    W = W if a is None else a.unsqueeze(-1) * W
    z = None if z is None else z.double() if a is None else a * z.double()
    recall = (k.unsqueeze(-2) @ W).squeeze(-2)
    if z is not None:
        recall = recall / (z * k).sum(-1, keepdim=True)
        z = z + (k if e is not None or w is None else w * k)
    W = W + k.unsqueeze(-1) * ((one if w is None else w) * v - (0 if e is None else e * recall)).unsqueeze(-2)
    y = (q.unsqueeze(-2) @ W).squeeze(-2)
    y = y if z is None else y / (z * q).sum(-1, keepdim=True)
    return [y.unsqueeze(1), W, *([] if z is None else [z])]


def _without_time(gate: Tensor) -> Tensor:
    return gate.transpose(1, 2) if gate.dim() == 3 else gate[:, 0]


def _exact(
    signature: WalkSignature, inputs: tuple[Tensor | None, ...], bounds: Tensor | None, dy: Tensor, dW: Tensor
) -> list[Tensor]:
    """Compute y, W and the gradients of what is there, in float64 by plain PyTorch.

    Not as custom ops, and with the gradient of a number: else the first call imports PyTorch's compiler or its symbolic
    shapes, which takes longer than the rest of the check.
    """
    q, k, v, a, e, w, W = (None if x is None else x.detach().double() for x in inputs)
    there = [x for x in (q, k, v, a, e, w, W) if x is not None]
    assert q is not None and k is not None and v is not None and W is not None
    maps, chunk = signature.features, chunked.chunk_length(signature.features.size(signature.D), signature.M)
    with torch.enable_grad():
        for x in there:
            x.requires_grad_()
        a, e, w = (None if gate is None else maps.gate(gate) for gate in (a, e, w))
        mapped = (maps.of(q), maps.of(k), v, a, e, e if signature.tied else w, W)
    *tokens, W = (None if x is None else x.detach() for x in mapped)
    settings = (chunk, signature.per_key)
    y, W_end, *before = chunked.OPERATOR.forward(tokens, W, bounds, torch.float64, True, *settings)
    grads = chunked.OPERATOR.backward(dy.double(), dW.double(), tokens, before, bounds, *settings)
    with torch.enable_grad():
        total = sum((x * grad).sum() for x, grad in zip([x for x in mapped if x is not None], grads, strict=True))
    return [y, W_end, *torch.autograd.grad(total, there)]


def shipped() -> Iterator[Signature]:
    """Yield every row of the table with the delta rule, in groups, and packed with the gated one; then fused maps."""
    for dtype, D, M, config in plain_rows():
        if dtype in LIMITS:
            grouped = configuration(D, M, dtype, 1, LONG)
            recurrent = isinstance(config, RecurrentWalk)
            for row in (config,) if config == grouped or recurrent else (config, grouped):
                yield WalkSignature(dtype, D, M, False, True, False, True, False, row)
            yield WalkSignature(dtype, D, M, not recurrent, True, False, True, True, config)
    for D, M in TABLE[torch.float16]:
        # One token takes these in bfloat16 too.
        config = configuration(D, M, torch.bfloat16, FEW + 1, 1)
        yield WalkSignature(torch.bfloat16, D, M, True, True, False, True, False, config)
    # The paper's heads, and those with the most features that are mapped on chip.
    for dtype in LIMITS:
        for d, name, nu in ((16, "elu", 0), (32, "elu", 0), *((d, "dpfp", nu) for d in (16, 32) for nu in (1, 2, 3))):
            features = Features.named(name, nu, sum=True, logits=True)
            config = configuration(features.size(d), d, dtype, FEW + 1, LONG, features)
            yield WalkSignature(dtype, d, d, False, True, False, True, False, config, features)
            yield StepSignature(dtype, d, d, False, True, False, True, False, features)
        for D, M in ((64, 64), (512, 256)):
            yield StepSignature(dtype, D, M, True, True, False, True, True)
        for D, M in ((16, 16), (64, 64), (128, 128), (512, 256)):
            (config,) = per_key_candidates(D, M, dtype, LONG)
            yield WalkSignature(dtype, D, M, True, True, False, True, False, config, per_key=True)
            yield WalkSignature(dtype, D, M, True, False, False, False, True, config, per_key=True)
            yield StepSignature(dtype, D, M, True, True, False, True, False, per_key=True)
