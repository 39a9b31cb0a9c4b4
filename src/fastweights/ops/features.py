"""What keys, queries and gates go through before the memory sees them, in plain PyTorch.

A layer hands over raw heads and says here what they have to go through. Whether that happens inside a kernel is the
backend's business, which decides by `Features`, the description that kernels understand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fastweights.common.tables import look_up
from fastweights.ops.normalization import sum_normalize


def elu(x: Tensor) -> Tensor:
    """Compute ELU(x) + 1, Eq. 30."""
    # Not elu(x) + 1: its exp(x) - 1 + 1 has lost every digit below x = -6 in bfloat16.
    return x.clamp(max=0).exp() + x.relu()


def relu(x: Tensor) -> Tensor:
    """Compute max(0, x)."""
    return x.relu()


def dpfp(x: Tensor, nu: int) -> Tensor:
    """Compute products of rectified entries up to nu apart, Eq. 37."""
    r = torch.cat([x.relu(), (-x).relu()], -1)
    return torch.cat([r * r.roll(j, -1) for j in range(1, nu + 1)], -1)


MAPS: dict[str, Callable[..., Tensor]] = {"none": lambda x: x, "elu": elu, "relu": relu, "dpfp": dpfp}


class Features(NamedTuple):
    """A map by its name in `MAPS` with its `nu`; whether phi is divided by its sum; whether gates are logits.

    The map is called "other" where it is one that no kernel knows, and only a `MapFeatures` can compute it.
    """

    map: str = "none"
    nu: int = 0
    sum: bool = False
    logits: bool = False

    @classmethod
    def named(cls, name: str, nu: int = 0, sum: bool = False, logits: bool = False) -> Features:
        """Return the features with the map called `name`."""
        look_up(MAPS, name, "fused feature map")
        if (name == "dpfp") != (nu > 0):
            raise ValueError(f"nu is for dpfp, at least 1, got nu = {nu} with feature map {name!r}")
        return cls(name, nu, bool(sum), bool(logits))

    @property
    def description(self) -> Features:
        """What a backend decides by: the features themselves."""
        return self

    @property
    def maps(self) -> bool:
        """Whether keys and queries go through a map."""
        return self.map != "none"

    def size(self, d: int) -> int:
        """Return D, the size of phi of a head of size d."""
        return 2 * d * self.nu if self.nu else d

    def describe(self, d: int) -> str:
        """Say it in words, for heads of size d."""
        if self == PLAIN:
            return f"D = {d}"
        name = self.map + (f"-{self.nu}" if self.nu else "")
        return f"d = {d} through {name}{', sum normalised' if self.sum else ''}{', logits' if self.logits else ''}"

    def of(self, x: Tensor) -> Tensor:
        """Return phi(x), divided by its sum where that is asked for, in the dtype of x."""
        phi, dtype = MAPS[self.map], x.dtype
        if self.sum:
            # What is divided by a small sum has gradients for which 16 bits have no room, however small those of x are.
            x = x.to(torch.promote_types(dtype, torch.float32))
        x = phi(x, self.nu) if self.nu else phi(x)
        return sum_normalize(x).to(dtype) if self.sum else x

    def apply(self, q: Tensor, k: Tensor, divided: bool) -> tuple[Tensor, Tensor]:
        """Map queries and keys."""
        return self.of(q), self.of(k)

    def gate(self, x: Tensor) -> Tensor:
        """Return the gate that x is, or whose logit it is, in at least float32: 16 bits have no room next to 1."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x.sigmoid() if self.logits else x


PLAIN = Features()


class Map(Protocol):
    """What `MapFeatures` ask of a feature map; `fastweights.FeatureMap` has it.

    `kernel` is the map's name in `MAPS`, None for a map that no kernel knows; `nu` is there for "dpfp" alone.
    """

    kernel: ClassVar[str | None]
    dim: int

    def map(self, x: Tensor) -> Tensor:
        """Compute phi(x)."""
        ...

    def scaled(self, x: Tensor) -> Tensor:
        """Compute phi(x) times some positive number of each token."""
        ...


@dataclass(frozen=True, eq=False)
class MapFeatures:
    """Any feature map, a normalisation of what it gives, and whether gates are logits."""

    phi: Map
    normalize: Callable[[Tensor], Tensor] | None = None
    logits: bool = False

    @property
    def description(self) -> Features:
        """The same by name, which is all that a backend decides by."""
        sums = self.normalize is sum_normalize
        if self.phi.kernel is None or not (sums or self.normalize is None):
            return Features("other", logits=self.logits)
        return Features(self.phi.kernel, getattr(self.phi, "nu", 0), sums, self.logits)

    def size(self, d: int) -> int:
        """Return D, the size of phi."""
        return self.phi.dim

    def apply(self, q: Tensor, k: Tensor, divided: bool) -> tuple[Tensor, Tensor]:
        """Map queries and keys; `divided` says that queries' reads are divided by phi(q)·z, so that scale is free."""
        if self.normalize is not None:
            return self.normalize(self.phi.scaled(q)), self.normalize(self.phi.scaled(k))
        return self.phi.scaled(q) if divided else self.phi.map(q), self.phi.map(k)

    def gate(self, x: Tensor) -> Tensor:
        """Return the gate that x is, or whose logit it is, in at least float32."""
        return Features(logits=self.logits).gate(x)
