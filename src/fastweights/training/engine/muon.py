"""Muon for the matrices inside a model's blocks, Adam for all else, as one optimiser [Jordan et al. 2024].

torch.optim.Muon reads its rate back from the device and goes through the matrices one by one. Here those of one shape
go through each product together, and nothing waits for the device, so that an update can be captured as a CUDA graph.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

MOMENTUM = 0.95
# The quintic whose five-fold iteration takes every singular value from 0.002 to 1 to between 0.68 and 1.21.
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Compute about U V^T for each of the matrices U S V^T (N, A, B), by Newton-Schulz iteration; in bfloat16 on a GPU.

    X = X / ||X||, then five times X = a X + (b X X^T + c (X X^T)^2) X.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def hidden_weights(parts: Iterable[nn.Module]) -> list[Tensor]:
    """Return the matrices of those modules that map vectors to vectors."""
    linear = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    return [module.weight for module in linear if module.weight.requires_grad]


class Muon(Adam):
    """Adam, but for groups with "muon" True, whose matrices W (A, B) with gradient G take the step

        M = 0.95 M + 0.05 G,  W = W - lr sqrt(max(1, A / B)) orthogonalize(0.05 G + 0.95 M)

    after decoupled weight decay. Like torch's fused Adam it divides by `grad_scale` and skips on `found_inf`.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update of all groups."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        groups = self.param_groups
        for group in groups:
            if group.get("muon"):
                self._step_muon(group)
        self.param_groups = _of_adam(groups)
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Adam looks for its own state in every group.
        super().__setstate__({**state, "param_groups": _of_adam(state["param_groups"])})
        self.param_groups = state["param_groups"]

    def _step_muon(self, group: dict[str, Any]) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for weight in group["params"]:
            if weight.grad is not None:
                shapes.setdefault(weight.shape, []).append(weight)
        scale, broken = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        for shape, weights in shapes.items():
            memory = [self._momentum(weight) for weight in weights]
            gradient, before = torch.stack([weight.grad for weight in weights]), torch.stack(memory)  # type: ignore[misc]
            if scale is not None:
                gradient = gradient / scale
            after = before.lerp(gradient, 1 - MOMENTUM)
            turn = orthogonalize(gradient.lerp(after, MOMENTUM)) * math.sqrt(max(1.0, shape[0] / shape[1]))
            turn, shrink = turn * group["lr"], torch.as_tensor(1 - group["lr"] * group["weight_decay"])
            if broken is not None:
                # Filled, not multiplied by 0, which what is not a number survives.
                skip = broken > 0
                after = torch.where(skip, before, after)
                turn, shrink = turn.masked_fill(skip, 0.0), shrink.masked_fill(skip, 1.0)
            torch._foreach_copy_(memory, after.unbind())
            if group["weight_decay"]:
                torch._foreach_mul_(weights, shrink)
            torch._foreach_sub_(weights, list(turn.unbind()))

    def _momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        return state["momentum"]


def _of_adam(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if not group.get("muon")]
