"""The memory in ONNX: by the operator LinearAttention where that has the rule, and by Scan otherwise.

LinearAttention is standard from opset 27 on, and ONNX Runtime has it in its own domain, com.microsoft. Both compute,
with the natural logarithms g of decays,

    S = exp(g_t) S;  S = S + beta_t k_t (v_t - S^T k_t)^T;  y_t = scale S^T q_t,

the first step for "gated" and "gated_delta" only, and without beta S + k_t v_t^T for "linear" and "gated".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.ops import family, reference
from fastweights.ops.backends import BACKENDS
from fastweights.ops.spec import Backend, Executable, Inputs, Refusal, Spec, expanding_first, mapping_first

# What LinearAttention calls a rule, by whether there is a decay and a beta.
UPDATE_RULES = {
    (False, False): "linear",
    (True, False): "gated",
    (False, True): "delta",
    (True, True): "gated_delta",
}
NAME = "onnx"


def linear_attention(
    domain: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, W: Tensor
) -> tuple[Tensor, Tensor]:
    """Stand for a node LinearAttention of a domain in what is exported; `decay` is a logarithm."""
    H, M = v.shape[2:]
    attributes: dict[str, Any] = {"q_num_heads": H, "kv_num_heads": H, "scale": 1.0}
    attributes["update_rule"] = UPDATE_RULES[decay is not None, beta is not None]
    values = v.flatten(2)
    y, W = torch.onnx.ops.symbolic_multi_out(
        f"{domain}::LinearAttention",
        [q.flatten(2), k.flatten(2), values, W, None if decay is None else decay.flatten(2), beta],
        attributes,
        dtypes=(v.dtype, W.dtype),
        shapes=(values.shape, W.shape),
        version=1,
    )
    return y.unflatten(2, (H, M)), W


def expressible(spec: Spec) -> bool:
    """Return whether LinearAttention has the rule: one that only adds, or that erases as much as it writes."""
    if family.outside(spec.rule):
        return False
    _, erases, _, tied = family.coefficients_there(spec)
    return not erases or (tied and not spec.normalized)


def scanned(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run any rule as a scan over time, of which each step is that of the reference."""
    # Slow to import, and needed here only.
    from torch._higher_order_ops.scan import scan

    W, z = inputs.initial_state()
    rule, gates, normalized = inputs.rule, inputs.rule.gates_from(inputs.gates), z is not None

    def step(carried: list[Tensor], token: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        (q, k, v, *rest), before = token, carried[1] if normalized else None
        W, z = reference.advance(rule, carried[0], before, k, v, dict(zip(gates, rest, strict=True)))
        return [W] if z is None else [W, z], reference.read(W, q, z)

    wide = [x if x.dim() == 4 else x.unsqueeze(-1) for x in gates.values()]
    tokens = [x.movedim(1, 0) for x in (inputs.q, inputs.k, inputs.v, *wide)]
    (W, *rest), y = scan(step, [W] if z is None else [W, z], tokens)
    return y.movedim(0, 1), W, rest[0] if rest else None


def _recurrence(domain: str, log: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute what `ops.family.Recurrence` does by LinearAttention; with `log`, a is the logarithm of the decays."""
    q, k, v, a, e, w, W, _, dtype = arguments
    if w is not None and w is not e:
        v = v * w.unsqueeze(-1)
    if a is not None:
        a = (a if log else a.log()).clamp(min=family.LOG_OF_ZERO)
    if W is None:
        W = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    y, W = linear_attention(domain, q, k, v, a, e, W)
    return y.to(dtype), W


def backend(domain: str | None) -> Backend:
    """Return the backend that is traced: with LinearAttention where it has the rule, or without it."""

    def prepare(spec: Spec) -> Executable | Refusal:
        if spec.packed or spec.mask or spec.starts:
            return Refusal("packed sequences, masks and starts are not exported")
        if domain is None or not expressible(spec):
            return scanned
        log = family.in_logarithms(spec)
        return family.executable(spec, partial(_recurrence, domain, log), logs=log)

    return Backend(NAME, "for export to ONNX", mapping_first(expanding_first(prepare)))


@contextmanager
def traced(model: nn.Module, domain: str | None) -> Iterator[None]:
    """Let the fast weights of a model be computed in the way that is exported."""
    layers = [module for module in model.modules() if isinstance(module, FastWeightAttention)]
    before = [layer.backend for layer in layers]
    BACKENDS[NAME] = backend(domain)
    try:
        for layer in layers:
            layer.backend = NAME
        yield
    finally:
        del BACKENDS[NAME]
        for layer, name in zip(layers, before, strict=True):
            layer.backend = name
