"""Random calls of `fast_weight_memory`, and everything a call gives: outputs, final state, gradients."""

from dataclasses import dataclass, replace

import torch

import fastweights as fw
from fastweights.ops.backends import BACKENDS
from fastweights.ops.memory import fast_weight_memory
from fastweights.ops.rules import RULES
from fastweights.ops.spec import Refusal, Spec
from fastweights.ops.state import FastWeightState

FAMILY = [name for name, rule in RULES.items() if rule.coefficients is not None]
NORMALIZATIONS = [None, "attention"]
# Every rule with every backend that says it can run it, on the CPU in float64.
HERE = [name for name in BACKENDS if name != "triton"]
# The decays of a rule may be given per key channel and as logarithms, beside one number a head.
BY_FORM = ["decay per key", "gated_delta log", "gated_delta per key", "gated_delta log per key"]
CALLS = [*RULES, *BY_FORM]
PAIRS = [(name, backend) for name in CALLS for backend in HERE if name in (*FAMILY, *BY_FORM) or backend == "reference"]


@dataclass
class Call:
    """The tensors of one call; `state` is (W,) or (W, z)."""

    rule: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: dict[str, torch.Tensor]
    state: tuple[torch.Tensor, ...]

    @property
    def normalization(self):
        return "attention" if len(self.state) == 2 else None

    def inputs(self):
        return [self.q, self.k, self.v, *self.gates.values(), *self.state]

    def with_inputs(self, inputs):
        q, k, v, *rest = inputs
        n = len(self.gates)
        return replace(self, q=q, k=k, v=v, gates=dict(zip(self.gates, rest[:n], strict=True)), state=tuple(rest[n:]))

    def to(self, dtype):
        wide = torch.promote_types(dtype, torch.float32)
        moved = self.with_inputs([x.to(dtype) for x in self.inputs()])
        return replace(moved, state=tuple(x.to(wide) for x in self.state))

    def requiring_grad(self):
        return self.with_inputs([x.detach().clone().requires_grad_() for x in self.inputs()])

    def tokens(self, start, end):
        """The call on a stretch of time, from the same state."""
        return replace(
            self,
            q=self.q[:, start:end],
            k=self.k[:, start:end],
            v=self.v[:, start:end],
            gates={name: gate[:, start:end] for name, gate in self.gates.items()},
        )

    def run(self, backend="reference", **more):
        """[y, W] or [y, W, z]."""
        y, state = fast_weight_memory(
            self.q,
            self.k,
            self.v,
            rule=self.rule,
            normalization=self.normalization,
            state=FastWeightState(*self.state),
            backend=backend,
            **self.gates,
            **more,
        )
        return [y, *state.tensors().values()]


def gate_names(name):
    """The gates of a random call of that name."""
    rule, _, form = name.partition(" ")
    return [f"log_{gate}" if gate == "decay" and "log" in form else gate for gate in RULES[rule].gate_names]


def random_call(rule, normalization=None, B=2, T=7, H=2, D=5, M=3, dtype=torch.float64, seed=0):
    """Positive, sum-normalised keys as the paper has them, and gates that are now and then fully open or shut.

    `rule` is one of `CALLS`.
    """
    rule, _, form = rule.partition(" ")
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    q, k = uniform(B, T, H, D), uniform(B, T, H, D) ** 2
    gates = {}
    for name in RULES[rule].gate_names:
        shape = (B, T, H, D) if name == "decay" and "per key" in form else (B, T, H)
        gate = uniform(*shape)
        gates[name] = torch.where(uniform(*shape) < 0.1, gate.round(), gate)
    if normalization and "decay" in gates:
        # A memory wiped out by decay = 0 reads as 0 by definition, which is no limit of decays above 0.
        gates["decay"] = gates["decay"].clamp(min=0.05)
    if "log" in form:
        # Far enough from 0 for finite differences of the logarithm.
        gates["log_decay"] = gates.pop("decay").clamp(min=1e-3).log()
    state = (uniform(B, H, D, M) - 0.5, uniform(B, H, D))[: 2 if normalization else 1]
    call = Call(rule, q / q.sum(-1, keepdim=True), k / k.sum(-1, keepdim=True), uniform(B, T, H, M) - 0.5, gates, state)
    return call.to(dtype)


def refusal(backend, inputs):
    """Why the backend does not run the call; None if it does."""
    answer = backend.prepare(Spec.of(inputs))
    return answer.reason if isinstance(answer, Refusal) else None


def gradients(outputs, inputs, seed=1, exact_in=torch.float64):
    """Gradients of a random projection of all outputs, the final state among them; of weights that a dtype can hold."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(exact_in) for out in outputs]
    loss = sum((out.double() * w.double().to(out.device)).sum() for out, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, inputs)


def relative_error(ours, theirs):
    """||ours - theirs|| / ||theirs||, the largest over pairs; NaN counts as infinite.

    What is nearly 0 beside the other tensors, such as a gradient that cancels, is measured against them.
    """
    worst = 0.0
    least = 1e-3 * max(b.double().norm().item() for b in theirs) or 1.0
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=least)
        worst = max(worst, float("inf") if error.isnan() else error.item())
    return worst


def linear_attention_errors(dtype, D, T, S, mean, device="cpu"):
    """How far y and the gradients of q, k and v are from float64, where values have a mean and some are padding."""
    q, k = (torch.rand(3, n, 8, D, device=device) for n in (T, S))
    v = mean + torch.randn(3, S, 8, 64, device=device)
    mask = torch.arange(S, device=device) < torch.tensor([[S], [S // 3], [1]], device=device)
    exact = [x.to(dtype).double() for x in (q, k, v)]
    found = []
    for kind in (dtype, torch.float64):
        inputs = [x.to(kind).requires_grad_() for x in exact]
        y = fw.linear_attention(*inputs, mask)
        found.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True)]
