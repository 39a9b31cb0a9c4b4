"""Learning-rate schedules, the optimiser, and the norm of the gradient."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from fastweights.common.sharding import is_sharded
from fastweights.training.engine.config import SCHEDULES, TrainingConfig
from fastweights.training.engine.muon import Muon, hidden_weights


def learning_rate(config: TrainingConfig, t: int) -> float:
    """Return the rate of update t, counted from 0: lr * t / warmup below the warm-up, then the schedule.

    "cosine" is the authors' closed form lr / 2 * (1 + cos(pi t / steps)), which counts from 0 and not from the end of
    the warm-up; "inverse_sqrt" is lr * sqrt(warmup / t); "linear" falls to 0 from the end of the warm-up; "trapezoid"
    is lr up to the cooldown and falls to 0 in it. Update 0 would have rate 0; it takes that of update 1, or the full
    one under `first_step_full`.
    """
    if t == 0 and config.first_step_full:
        return config.lr
    t = max(t, 1)
    if t < config.warmup:
        return config.lr * t / config.warmup
    return config.lr * SCHEDULES[config.schedule](t, config.steps, config.warmup, config.cooldown)


def make_optimizer(model: nn.Module, config: TrainingConfig, regions: Iterable[nn.Module] = ()) -> Optimizer:
    """Make Adam, or AdamW with weight decay; one fused kernel for all parameters where they are whole tensors.

    Under `config.optimizer` "muon" the matrices inside `regions` are Muon's.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient; there is nothing to train")
    sharded = any(is_sharded(parameter) for parameter in parameters)
    device = parameters[0].device

    def rate(value: float) -> Tensor | float:
        # A rate that lives on the device can change between replays of a CUDA graph.
        return torch.tensor(value, device=device) if device.type == "cuda" and not sharded else value

    options: dict[str, Any] = {"lr": rate(config.lr), "betas": config.betas, "eps": config.eps}
    options["fused"] = not sharded and device.type in ("cpu", "cuda")
    # All it asks of the fused kernels is to let themselves be captured.
    options["capturable"] = not sharded and device.type == "cuda"
    if config.optimizer == "adam" and not config.weight_decay:
        return Adam(parameters, **options)
    in_blocks = set(hidden_weights(regions)) if config.optimizer == "muon" else set()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2 and p not in in_blocks], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.optimizer == "adam":
        return AdamW([group for group in groups if group["params"]], **options)
    if not in_blocks:
        raise ValueError(
            f"optimizer 'muon' is for the matrices inside a model's blocks, and the task names no blocks of "
            f"{type(model).__name__}; train with optimizer 'adam'"
        )
    if sharded:
        raise ValueError(
            "optimizer 'muon' needs whole matrices, and strategy 'fsdp' cuts them up; train with strategy 'ddp', or "
            "with optimizer 'adam'"
        )
    matrices = {"params": [p for p in parameters if p in in_blocks], "weight_decay": config.weight_decay, "muon": True}
    groups.append(matrices | {"lr": rate(config.muon_lr), "scale": config.muon_lr / config.lr})
    return Muon([group for group in groups if group["params"]], decoupled_weight_decay=True, **options)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Give every group the rate, times its "scale" if it has one."""
    for group in optimizer.param_groups:
        scaled = value * group.get("scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients, or this process' part of them, as plain tensors that share their memory."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if is_sharded(gradient) else gradient for gradient in gradients]


def global_norm(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Compute the L2 norm of all gradients, over processes where each has a part, without waiting for the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=device)
    return norm.full_tensor() if is_sharded(norm) else norm


def step_scaled(optimizer: Optimizer, step: Callable[[], object], factor: Tensor, broken: Tensor) -> None:
    """Take `step` with all gradients times `factor`, or none at all where `broken` is 1, without asking the host.

    The fused kernels of torch's Adam divide by `grad_scale` and skip on `found_inf` while they read the gradients, as
    they do for `torch.amp.GradScaler`; other optimisers get the gradients multiplied and are not held back.
    """
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups) and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = factor.reciprocal().float()  # type: ignore[attr-defined]
        optimizer.found_inf = broken.float()  # type: ignore[attr-defined]
    else:
        gradients = local_gradients(parameter for group in groups for parameter in group["params"])
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    step()
