"""What keys, queries and gates go through before the memory sees them, in plain PyTorch.

A layer hands over raw heads and says here what they have to go through. Whether that happens inside a kernel is the
backend's business, which decides by `Features`, the description that kernels understand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.common.tables import look_up
from fastweights.ops.normalization import smooth_l2_normalize, sum_normalize


def elu(x: Tensor) -> Tensor:
    """Compute ELU(x) + 1, Eq. 30."""
    # Not elu(x) + 1: its exp(x) - 1 + 1 has lost every digit below x = -6 in bfloat16.
    return x.clamp(max=0).exp() + x.relu()


def relu(x: Tensor) -> Tensor:
    """Compute max(0, x)."""
    return x.relu()


def silu(x: Tensor) -> Tensor:
    """Compute x sigmoid(x)."""
    return F.silu(x)


def dpfp(x: Tensor, nu: int) -> Tensor:
    """Compute products of rectified entries up to nu apart, Eq. 37."""
    r = torch.cat([x.relu(), (-x).relu()], -1)
    return torch.cat([r * r.roll(j, -1) for j in range(1, nu + 1)], -1)


def favor(x: Tensor, vectors: Tensor, inner: float) -> Tensor:
    """Compute exp(r·x - |inner x|²/2) and exp(-r·x - |inner x|²/2) over sqrt(2 m) for the m rows r of `vectors`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    level = wide.square().sum(-1, keepdim=True) * (inner**2 / 2) + math.log(2 * len(vectors)) / 2
    return (_exponents(wide, vectors) - level).exp().to(x.dtype)


def favor_scaled(x: Tensor, vectors: Tensor) -> Tensor:
    """Compute the same over its largest entry. Where q and k both lie along a long r, phi(q)·phi(k) may overflow."""
    exponents = _exponents(x.to(torch.promote_types(x.dtype, torch.float32)), vectors)
    return (exponents - exponents.detach().amax(-1, keepdim=True)).exp().to(x.dtype)


def _exponents(wide: Tensor, vectors: Tensor) -> Tensor:
    with torch.autocast(wide.device.type, enabled=False):
        product = wide @ vectors.to(wide.dtype).mT
    return torch.cat([product, -product], -1)


MAPS: dict[str, Callable[..., Tensor]] = {"none": lambda x: x, "elu": elu, "relu": relu, "silu": silu, "dpfp": dpfp}


class Features(NamedTuple):
    """A map by its name in `MAPS` with its `nu`; how phi is normalised; whether gates are logits.

    With `sum` phi is divided by its sum, with `l2` by sqrt(|phi|² + 1e-6). Queries are then multiplied by `scale`. The
    map is called "other" where it is one that no kernel knows, and only a `MapFeatures` can compute it. So does it for
    "favor", with m random vectors for heads times `inner`, which some kernels compute if they are given the vectors.
    """

    map: str = "none"
    nu: int = 0
    sum: bool = False
    logits: bool = False
    l2: bool = False
    scale: float = 1.0
    m: int = 0
    inner: float = 1.0

    @classmethod
    def named(
        cls, name: str, nu: int = 0, sum: bool = False, logits: bool = False, l2: bool = False, scale: float = 1.0
    ) -> Features:
        """Return the features with the map called `name`."""
        look_up(MAPS, name, "fused feature map")
        if (name == "dpfp") != (nu > 0):
            raise ValueError(f"nu is for dpfp, at least 1, got nu = {nu} with feature map {name!r}")
        if sum and l2:
            raise ValueError("phi is divided by its sum or by its norm, not by both; give sum or l2")
        return cls(name, nu, bool(sum), bool(logits), bool(l2), float(scale))

    @property
    def description(self) -> Features:
        """What a backend decides by: the features themselves."""
        return self

    @property
    def maps(self) -> bool:
        """Whether keys and queries go through a map."""
        return self.map != "none"

    def size(self, d: int) -> int:
        """Return D, the size of phi of a head of size d; refuse a `nu` for which products of entries would repeat."""
        if self.nu >= 2 * d:
            raise ValueError(f"nu must be at most 2 d - 1 = {2 * d - 1} for heads of d = {d}, got {self.nu}")
        return 2 * self.m or 2 * d * self.nu or d

    def describe(self, d: int) -> str:
        """Say it in words, for heads of size d."""
        if self == PLAIN:
            return f"D = {d}"
        name = self.map + (f"-{self.nu or self.m}" if self.nu or self.m else "")
        how = {"sum normalised": self.sum, "L2 normalised": self.l2, "logits": self.logits}
        how[f"queries scaled by {self.scale:g}"] = self.scale != 1
        return ", ".join([f"d = {d} through {name}", *(words for words, holds in how.items() if holds)])

    def of(self, x: Tensor) -> Tensor:
        """Return phi(x), normalised as is asked for, in the dtype of x."""
        phi, dtype = MAPS[self.map], x.dtype
        if self.sum or self.l2:
            # What is divided by a small sum has gradients for which 16 bits have no room, however small those of x are.
            x = x.to(torch.promote_types(dtype, torch.float32))
        x = phi(x, self.nu) if self.nu else phi(x)
        x = sum_normalize(x) if self.sum else smooth_l2_normalize(x) if self.l2 else x
        return x.to(dtype)

    def queries(self, q: Tensor, divided: bool) -> Tensor:
        """Map queries."""
        return _scaled(self.of(q), self.scale)

    def keys(self, k: Tensor) -> Tensor:
        """Map keys."""
        return self.of(k)

    def apply(self, q: Tensor, k: Tensor, divided: bool) -> tuple[Tensor, Tensor]:
        """Map both."""
        return self.queries(q, divided), self.keys(k)

    def gate(self, x: Tensor) -> Tensor:
        """Return the gate that x is, or whose logit it is, in at least float32: 16 bits have no room next to 1."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x.sigmoid() if self.logits else x


PLAIN = Features()


def _scaled(q: Tensor, scale: float) -> Tensor:
    return q if scale == 1 else q * scale


class Map(Protocol):
    """What `MapFeatures` ask of a feature map; `fastweights.FeatureMap` has it.

    `kernel` is the map's name in `MAPS` or "favor", None for a map that no kernel knows; `nu` is there for "dpfp"
    alone, `m`, `inner` and `vectors` for "favor".
    """

    kernel: ClassVar[str | None]

    @property
    def dim(self) -> int:
        """D, the size of phi."""
        ...

    def map(self, x: Tensor) -> Tensor:
        """Compute phi(x)."""
        ...

    def scaled(self, x: Tensor) -> Tensor:
        """Compute phi(x) times some positive number of each token."""
        ...


@dataclass(frozen=True, eq=False)
class Drawn:
    """FAVOR+ as a map, with `vectors` (m, R) that are drawn, and times `inner`."""

    vectors: Tensor
    inner: float
    kernel: ClassVar[str | None] = "favor"

    @property
    def d_key(self) -> int:
        """The size of heads."""
        return self.vectors.shape[1]

    @property
    def m(self) -> int:
        """Vectors."""
        return len(self.vectors)

    @property
    def dim(self) -> int:
        """Features."""
        return 2 * len(self.vectors)

    def map(self, x: Tensor) -> Tensor:
        """Compute phi(x)."""
        return favor(x, self.vectors, self.inner)

    def scaled(self, x: Tensor) -> Tensor:
        """Compute phi(x) over its largest entry."""
        return favor_scaled(x, self.vectors)


@dataclass(frozen=True, eq=False)
class MapFeatures:
    """Any feature map, a normalisation of what it gives, whether gates are logits, and a scale of the queries."""

    phi: Map
    normalize: Callable[[Tensor], Tensor] | None = None
    logits: bool = False
    scale: float = 1.0

    @property
    def description(self) -> Features:
        """The same by name, which is all that a backend decides by."""
        sums, l2 = self.normalize is sum_normalize, self.normalize is smooth_l2_normalize
        if self.phi.kernel is None or not (sums or l2 or self.normalize is None):
            return Features("other", logits=self.logits)
        phi: Any = self.phi
        nu, m, inner = getattr(phi, "nu", 0), getattr(phi, "m", 0), getattr(phi, "inner", 1.0)
        return Features(phi.kernel, nu, sums, self.logits, l2, self.scale, m, inner)

    @property
    def vectors(self) -> Tensor | None:
        """The vectors of FAVOR+ as they are now; None for other maps."""
        phi: Any = self.phi
        return phi.vectors if self.phi.kernel == "favor" else None

    def drawn(self, vectors: Tensor | None) -> MapFeatures:
        """Return the same with these `vectors`: others may have been drawn since they were."""
        return self if vectors is None else replace(self, phi=Drawn(vectors, self.description.inner))

    def size(self, d: int) -> int:
        """Return D, the size of phi; refuse heads of another size d than the map is made for."""
        made_for = getattr(self.phi, "d_key", d)
        if made_for != d:
            raise ValueError(f"the feature map is for heads of {made_for}, got heads of {d}; make it with d_key = {d}")
        return self.phi.dim

    def queries(self, q: Tensor, divided: bool) -> Tensor:
        """Map queries; `divided` says that their reads are divided by phi(q)·z, so that scale is free."""
        if self.normalize is not None:
            return _scaled(self._normalized(q), self.scale)
        return _scaled(self.phi.scaled(q) if divided else self.phi.map(q), self.scale)

    def keys(self, k: Tensor) -> Tensor:
        """Map keys."""
        return self.phi.map(k) if self.normalize is None else self._normalized(k)

    def apply(self, q: Tensor, k: Tensor, divided: bool) -> tuple[Tensor, Tensor]:
        """Map both."""
        return self.queries(q, divided), self.keys(k)

    def _normalized(self, x: Tensor) -> Tensor:
        assert self.normalize is not None
        if self.normalize is smooth_l2_normalize:
            # The smooth norm alone can tell how long phi is.
            return self.normalize(self.phi.map(x.to(torch.promote_types(x.dtype, torch.float32))))
        return self.normalize(self.phi.scaled(x))

    def gate(self, x: Tensor) -> Tensor:
        """Return the gate that x is, or whose logit it is, in at least float32."""
        return Features(logits=self.logits).gate(x)
