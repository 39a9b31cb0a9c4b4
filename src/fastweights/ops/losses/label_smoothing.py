"""The losses of a softmax with label smoothing, on a GPU without float32 copies of the logits."""

import torch
from torch import Tensor

from fastweights.ops.gpu.label_smoothing.operators import fused_nll
from fastweights.ops.gpu.label_smoothing.self_check import refuses


def smoothed_nll(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Compute losses (...) in nats of targets (...) under logits (..., V), smoothed and not; float32 at least.

    Equivalent to

        log_p = log_softmax(logits, -1)
        nll = -log_p[targets]
        (1 - smoothing) * nll - smoothing * log_p.mean(-1), nll

    Targets must be from 0 to V - 1; on a GPU they are not checked. Under `torch.func` or forward-mode derivatives,
    plain PyTorch computes them everywhere.
    """
    # What `torch.compile` makes of the plain form is as good.
    if torch.compiler.is_compiling() or refuses(logits) is not None:
        return dense_nll(logits, targets, smoothing)
    smoothed, nll = fused_nll(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), smoothing)
    return smoothed.view(targets.shape), nll.view(targets.shape)


def dense_nll(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Compute the same in plain PyTorch."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = logits.logsumexp(-1)
    nll = total - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return nll if not smoothing else torch.lerp(nll, total - logits.mean(-1), smoothing), nll
