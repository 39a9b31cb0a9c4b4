"""The paper's equations as a plain loop over time: any rule, any dtype, differentiable twice. The oracle."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastweights.ops.normalization import safe_divide
from fastweights.ops.rules import Rule
from fastweights.ops.spec import Inputs


def run(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute y (B, T, H, M), final W and z. Packed sequences run one after the other; y is 0 behind them."""
    if inputs.cu_seqlens is None:
        return _run_batch(inputs)
    ys, Ws, zs = zip(*(_run_batch(sequence) for sequence in inputs.unpack()), strict=True)
    y = torch.cat(ys, 1)
    y = pad(y, (0, 0, 0, 0, 0, inputs.q.shape[1] - y.shape[1]))
    return y, torch.cat(Ws), torch.cat(zs) if inputs.normalized else None


def _run_batch(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the recurrence itself. For the delta rule without normalisation it amounts to

    for t in range(T):
        v_bar = k[t] @ W
        W = W + outer(k[t], beta[t] * (v[t] - v_bar))
        y[t] = q[t] @ W
    """
    rule, dtype, (W, z) = inputs.rule, inputs.state_dtype, inputs.initial_state()
    # Unbound at once: the gradient of a slice is as large as the whole, and there are T of them.
    q, k, v = (x.to(dtype).unbind(1) for x in (inputs.q, inputs.k, inputs.v))
    wide = rule.gates_from({name: gate.to(dtype) for name, gate in inputs.gates.items()})
    gates = {name: (gate if gate.dim() == 4 else gate.unsqueeze(-1)).unbind(1) for name, gate in wide.items()}
    outputs = []
    for t in range(len(q)):
        gates_now = {name: gate[t] for name, gate in gates.items()}
        if inputs.starts is not None:
            W = W.masked_fill(inputs.starts[:, t, None, None, None], 0)
            z = None if z is None else z.masked_fill(inputs.starts[:, t, None, None], 0)
        W_old, z_old = W, z
        W, z = advance(rule, W, z, k[t], v[t], gates_now)
        if inputs.mask is not None:
            kept = inputs.mask[:, t, None, None]
            W = torch.where(kept.unsqueeze(-1), W, W_old)
            z = None if z is None or z_old is None else torch.where(kept, z, z_old)
        outputs.append(read(W, q[t], z))
    y = torch.stack(outputs, 1) if outputs else inputs.v.new_empty(inputs.v.shape)
    return y.to(inputs.q.dtype), W, z


def advance(
    rule: Rule, W: Tensor, z: Tensor | None, k: Tensor, v: Tensor, gates: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Return W and z after one token: k (B, H, D), v (B, H, M), gates (B, H, 1) or (B, H, D)."""
    a, c = rule.accumulator(**gates)
    z = z if z is None or a is None else a * z
    W = rule.step(W, k, v, lambda W, x: read(W, x, z), **gates)
    return W, None if z is None else z + (k if c is None else c * k)


def read(W: Tensor, x: Tensor, z: Tensor | None) -> Tensor:
    """Compute W x, Eq. 25, over z·x under attention normalisation, Eqs. 19, 27 and 28."""
    value = (x.unsqueeze(-2) @ W).squeeze(-2)
    return value if z is None else safe_divide(value, (x * z).sum(-1, keepdim=True))
