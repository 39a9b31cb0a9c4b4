"""The linear layers of a model of somebody else's, with their products as in this package's own layers."""

from __future__ import annotations

from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fastweights.ops.fused.linear import linear

_bound: WeakSet[nn.Module] = WeakSet()


def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a model, as its class's `__call__`, after its linear layers are bound."""
    if self not in _bound and not torch.compiler.is_compiling():
        bind(self)
    return nn.Module.__call__(self, *args, **kwargs)


def forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Compute what `nn.Linear.forward` does. It has the same name, by which a pickled layer finds that one again."""
    return linear(input, self.weight, self.bias)


def bind(model: nn.Module) -> None:
    """Let the linear layers of this model, those in float32 on a CPU, compute with `linear`.

    The layers keep their class: `forward` becomes an attribute of each, unless somebody has made it one already.
    """
    _bound.add(model)
    for layer in model.modules():
        ours = type(layer) is nn.Linear and "forward" not in vars(layer)
        if ours and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu":
            layer.forward = MethodType(forward, layer)


def release(kind: type[nn.Module]) -> None:
    """Give the linear layers of models of this class their own `forward` back."""
    for model in [model for model in _bound if isinstance(model, kind)]:
        _bound.remove(model)
        for layer in model.modules():
            if getattr(vars(layer).get("forward"), "__func__", None) is forward:
                del layer.forward
