"""What layers with fused GPU kernels share: the choice between those and plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastweights.common.tables import check_name

BACKENDS = ("auto", "fused", "dense")


def check_backend(backend: str) -> str:
    """Return `backend` if there is one of that name."""
    check_name(BACKENDS, backend, "backend")
    return backend


def takes_kernels(layer: nn.Module, x: Tensor, refuses: Callable[[], str | None]) -> bool:
    """Return whether the kernels are to compute, by `layer.backend` and the reason they have against this call."""
    if layer.backend == "dense" or (layer.backend == "auto" and not x.is_cuda):
        return False
    reason = refuses()
    if reason is not None and layer.backend == "fused":
        raise ValueError(f"{type(layer).__name__}.backend is 'fused', but {reason}; 'auto' takes plain PyTorch there")
    return reason is None


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Return x in the dtype of autocast, as the input of any matrix product."""
    device = x.device.type
    narrow = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if narrow else x
