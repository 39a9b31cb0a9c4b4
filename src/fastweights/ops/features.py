"""What a fused kernel does to keys, queries and gates before the memory sees them, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.common.tables import look_up
from fastweights.ops.normalization import sum_normalize


def elu(x: Tensor) -> Tensor:
    """ELU(x) + 1, Eq. 30."""
    # Not elu(x) + 1: its exp(x) - 1 + 1 has lost every digit below x = -6 in bfloat16.
    return x.clamp(max=0).exp() + x.relu()


def relu(x: Tensor) -> Tensor:
    """max(0, x)."""
    return x.relu()


def dpfp(x: Tensor, nu: int) -> Tensor:
    """Products of rectified entries up to nu apart, Eq. 37."""
    r = torch.cat([x.relu(), (-x).relu()], -1)
    return torch.cat([r * r.roll(j, -1) for j in range(1, nu + 1)], -1)


# In the order in which kernels number them: 0 leaves keys and queries as they are.
MAPS: dict[str, Callable[..., Tensor]] = {"none": lambda x: x, "elu": elu, "relu": relu, "dpfp": dpfp}


class Features(NamedTuple):
    """phi, by its number in `MAPS`, with DPFP's `nu`; whether phi is then divided by its sum; whether gates are logits.

    All integers, so that it passes through a custom op.
    """

    map: int = 0
    nu: int = 0
    sum: int = 0
    logits: int = 0

    @classmethod
    def named(cls, name: str, nu: int = 0, sum: bool = False, logits: bool = False) -> Features:
        """With the map called `name`."""
        look_up(MAPS, name, "fused feature map")
        if (name == "dpfp") != (nu > 0):
            raise ValueError(f"nu is for dpfp, at least 1, got nu = {nu} with feature map {name!r}")
        return cls(list(MAPS).index(name), nu, int(sum), int(logits))

    def size(self, d: int) -> int:
        """D, the size of phi of a head of size d."""
        return 2 * d * self.nu if self.nu else d

    def describe(self, d: int) -> str:
        """In words, for heads of size d."""
        if self == PLAIN:
            return f"D = {d}"
        name = list(MAPS)[self.map] + (f"-{self.nu}" if self.nu else "")
        return f"d = {d} through {name}{', sum normalised' if self.sum else ''}{', logits' if self.logits else ''}"

    def of(self, x: Tensor) -> Tensor:
        """Return phi(x), divided by its sum where that is asked for, in the dtype of x."""
        phi, dtype = list(MAPS.values())[self.map], x.dtype
        if self.sum:
            # What is divided by a small sum has gradients for which 16 bits have no room, however small those of x are.
            x = x.to(torch.promote_types(dtype, torch.float32))
        x = phi(x, self.nu) if self.nu else phi(x)
        return sum_normalize(x).to(dtype) if self.sum else x

    def gate(self, x: Tensor) -> Tensor:
        """The gate that x is, or that it is the logit of; at least float32."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x.sigmoid() if self.logits else x


PLAIN = Features()
