"""Derivatives that a custom operator does not know by itself: `torch.func`, `vmap` and forward mode."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or a level of forward-mode derivatives is active.

    There plain PyTorch has to compute: a custom operator would lose tangents without a word. `torch.compile` sees both.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_tangent(grad: Tensor, name: str) -> None:
    """Raise an error where a gradient that flows back into the operator `name` has a tangent, which would be lost."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(grad).tangent is not None:
        raise NotImplementedError(
            f"the gradient of {name} has no forward-mode derivative; run its forward pass inside the dual level too, "
            "where plain PyTorch computes it"
        )


def batched(*tensors: Tensor | None) -> bool:
    """Return whether one of these stands for many, under `vmap` or with `is_grads_batched`."""
    functorch = torch._C._functorch
    return any(
        x is not None and (functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x)) for x in tensors
    )
