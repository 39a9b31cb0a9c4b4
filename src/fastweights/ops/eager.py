"""Tell eager calls, which only autograd watches, from those that something traces, transforms or counts."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from fastweights.common.transforms import is_transformed

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Return whether a backward pass may come."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def is_watched() -> bool:
    """Return whether something that traces or counts stands between a call and its kernels; `is_transformed` aside."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return True
    if not torch._C._len_torch_function_stack():
        return False
    # A default device is no reason: all code here says where it makes its tensors.
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


_MOST_LEVELS = 8
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def is_eager(*tensors: Any) -> bool:
    """Return whether only autograd watches a call, and all tensors are plain numbers in memory."""
    if is_watched() or is_transformed():
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN_TENSORS or x.is_meta or x.is_neg() or x._is_zerotensor() or _is_batched(x):
            return False
    return True


def batch_level(*grads: Tensor | None) -> int:
    """Return the level of the batch that `is_grads_batched` has hidden in gradients, 0 for none."""
    for x in grads:
        if x is not None and _is_batched(x):
            for level in range(1, _MOST_LEVELS):
                if not _is_batched(torch._remove_batch_dim(x, level, 1, 0)):
                    return level
            raise RuntimeError("gradients in several batches within each other cannot be computed; use torch.func.vmap")
    return 0


def without_batch(x: Tensor | None, level: int) -> tuple[Tensor | None, int | None]:
    """Return x with the hidden batch as its first axis, and that axis; x and None if it has none."""
    return (torch._remove_batch_dim(x, level, 1, 0), 0) if x is not None and _is_batched(x) else (x, None)


def is_eager_gradient(*grads: Tensor | None) -> bool:
    """Return whether a backward pass may be eager, too: where it may be differentiated again, custom ops raise."""
    return not torch.is_grad_enabled() and is_eager(*grads)
