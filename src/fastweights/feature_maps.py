"""The feature maps phi of Sec. 5: from keys and queries of size d_key to the d_dot = `phi.dim` of the dot product.

A map is a module: `phi(x)` maps (..., d_key) to (..., dim), and `phi(q, k)` maps both. Only FAVOR+ can tell the
difference: it draws new random features for each call in training, and queries and keys must share them. To add a map,
decorate a class with `register_feature_map`, here or in a module of your own. A map that kernels can compute from raw
heads says under which name they know it (`kernel`).
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor, nn

from fastweights.common.tables import at_least_one, look_up
from fastweights.ops import features


class FeatureMap(nn.Module):
    """Base of the maps: subclasses set `dim` and write `map`.

    `kernel` is the name under which kernels know the map; None if they do not. Such a map has dim = d_key, or with an
    argument `nu` 2 d_key nu.
    """

    kernel: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: object) -> None:
        """Forget the name under which kernels know a base, where the map of a class is another one."""
        super().__init_subclass__(**options)
        named: Any = next(base for base in cls.__mro__ if "kernel" in vars(base))
        if (cls.map, cls.scaled) != (named.map, named.scaled):
            cls.kernel = None

    def __init__(self, d_key: int) -> None:
        super().__init__()
        at_least_one(d_key=d_key)
        self.d_key = d_key
        self.dim = d_key

    @overload
    def forward(self, x: Tensor, /) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, /, *more: Tensor) -> tuple[Tensor, ...]: ...
    def forward(self, x: Tensor, /, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute phi of each tensor, all with the same random features where the map has any."""
        for tensor in (x, *more):
            if tensor.shape[-1] != self.d_key:
                raise ValueError(f"expected (..., d_key = {self.d_key}), got {tuple(tensor.shape)}")
        if self.training:
            self.redraw()
        mapped = tuple(self.map(tensor) for tensor in (x, *more))
        return mapped if more else mapped[0]

    def map(self, x: Tensor) -> Tensor:
        """Compute phi(x) with the random features as they are."""
        raise AssertionError("a feature map defines `map`")

    def scaled(self, x: Tensor) -> Tensor:
        """Compute phi(x) times some positive number of each token, for callers whose results do not depend on it.

        Those are queries where what they find is divided by phi(q)·z, and all features that are normalised. A map that
        may overflow or underflow takes a number with which it does not. At least float32: what is divided by a small
        sum has gradients for which 16 bits have no room, however small those of x are.
        """
        return self.map(x.to(torch.promote_types(x.dtype, torch.float32)))

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features, where there are any, from `generator` or else from PyTorch's own numbers."""


FEATURE_MAPS: dict[str, type[FeatureMap]] = {}
Map = TypeVar("Map", bound=type[FeatureMap])


def register_feature_map(name: str) -> Callable[[Map], Map]:
    """Enter the decorated subclass of `FeatureMap` under `name`, for every layer and command."""

    def enter(cls: Map) -> Map:
        if name in FEATURE_MAPS:
            raise ValueError(f"there is a feature map {name!r} already; choose another name")
        FEATURE_MAPS[name] = cls
        # Where it depends on the options of a map, it is no name yet.
        if isinstance(cls.kernel, str):
            # What kernels are checked against, and what runs where there are none.
            features.MAPS.setdefault(cls.kernel, lambda x, *nu: cls(x.shape[-1], *nu).map(x))
        return cls

    return enter


def feature_map(name: str | FeatureMap, d_key: int | None = None, **options: object) -> FeatureMap:
    """Return the map of that name: `feature_map("dpfp", d_key=64, nu=2)`; `list_feature_maps()` shows the names."""
    if isinstance(name, FeatureMap):
        if options or d_key not in (None, name.d_key):
            raise ValueError(
                f"this feature map is made for d_key = {name.d_key}, got d_key = {d_key} and options {options}; "
                "give the name of a map instead, and one is made with these"
            )
        return name
    cls = look_up(FEATURE_MAPS, name, "feature map")
    try:
        return cls(d_key, **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"feature map {name!r} does not take {options}: {error}") from None


def list_feature_maps() -> dict[str, str]:
    """Return name and one-line description of every feature map."""
    return {name: (cls.__doc__ or "").splitlines()[0] for name, cls in FEATURE_MAPS.items()}


@register_feature_map("elu")
class ELU(FeatureMap):
    """ELU(x) + 1, positive [Eq. 30, Katharopoulos et al. 2020]; dim = d_key."""

    kernel = "elu"

    def map(self, x: Tensor) -> Tensor:
        return features.elu(x)


@register_feature_map("relu")
class ReLU(FeatureMap):
    """max(0, x); dim = d_key."""

    kernel = "relu"

    def map(self, x: Tensor) -> Tensor:
        return features.relu(x)


@register_feature_map("silu")
class SiLU(FeatureMap):
    """x sigmoid(x), signed: goes with L2 normalisation [Yang et al. 2024]; dim = d_key."""

    kernel = "silu"

    def map(self, x: Tensor) -> Tensor:
        return features.silu(x)


@register_feature_map("tanh")
class Tanh(FeatureMap):
    """tanh(x), signed [Schlag et al. 2021]; dim = d_key."""

    def map(self, x: Tensor) -> Tensor:
        return x.tanh()


@register_feature_map("identity")
class Identity(FeatureMap):
    """x itself [Sec. 3.1]; dim = d_key."""

    def map(self, x: Tensor) -> Tensor:
        return x


@register_feature_map("dpfp")
class DPFP(FeatureMap):
    """Products of rectified entries nu apart, sparse and without sampling [Eq. 37, Listing 1]; dim = 2 d_key nu.

    Equivalent to

        r = cat([relu(x), relu(-x)], -1)
        cat([r * r.roll(j, -1) for j in range(1, nu + 1)], -1)
    """

    kernel = "dpfp"

    def __init__(self, d_key: int, nu: int = 1) -> None:
        super().__init__(d_key)
        if not isinstance(nu, int) or not 1 <= nu <= 2 * d_key - 1:
            raise ValueError(f"nu must be a whole number from 1 to 2 d_key - 1 = {2 * d_key - 1}, got {nu!r}")
        self.nu = nu
        self.dim = 2 * d_key * nu

    def map(self, x: Tensor) -> Tensor:
        return features.dpfp(x, self.nu)


def orthonormal_rows(x: Tensor, n: int) -> Tensor:
    """Return n orthonormal rows (..., n, d) in random directions, from normal x (..., d, d).

    On a GPU by the method of Gram and Schmidt: a CUDA graph can capture its operations, but not `linalg.qr`.
    """
    return gram_schmidt(x[..., :n, :]) if x.is_cuda else torch.linalg.qr(x)[0].mT[..., :n, :]


def gram_schmidt(x: Tensor) -> Tensor:
    """Subtract from each row of x (..., n, d) its part along those before it, and divide it by its length."""
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    for i in range(x.shape[-2]):
        row = x[..., i : i + 1, :]
        row = row / row.norm(dim=-1, keepdim=True)
        overlap = (x * row).sum(-1, keepdim=True)
        x = torch.where(rows == i, row, torch.where(rows > i, x - overlap * row, x))
    return x


@register_feature_map("favor")
class FAVOR(FeatureMap):
    """Positive random features whose dot product estimates exp(q·k) [Eqs. 31-32, Choromanski et al. 2021]; dim = 2 m.

    phi(x) = exp(-|x|²/2) / sqrt(2 m) [exp(R x); exp(-R x)] with m rows r ~ N(0, I) in R, drawn anew for each call in
    training and fixed in evaluation. R is part of the `state_dict`.

    Args:
        m: number of random vectors; d_key log(d_key) is what the FAVOR+ paper recommends.
        orthogonal: rows orthogonal in blocks of d_key, each still N(0, I): less variance, still unbiased.
        scale: multiply x by d_key^(-1/4) first, so that the kernel is exp(q·k / sqrt(d_key)).
        stabilize: divide phi(x) by its largest entry, token by token. Nothing changes after sum normalisation, and
            features can no longer underflow to 0; without it the estimate of exp(q·k) is lost.
        redraw: False keeps the first draw in training too.
    """

    projection: Tensor

    def __init__(
        self,
        d_key: int,
        m: int | None = None,
        orthogonal: bool = False,
        scale: bool = False,
        stabilize: bool = False,
        redraw: bool = True,
    ) -> None:
        super().__init__(d_key)
        m = max(1, round(d_key * math.log(d_key))) if m is None else m
        at_least_one(m=m)
        self.m = m
        self.dim = 2 * m
        self.orthogonal, self.scale, self.stabilize, self.redraws = orthogonal, scale, stabilize, redraw
        self.inner = d_key**-0.25 if scale else 1.0
        self.register_buffer("projection", torch.empty(m, d_key))
        self._draw()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        if self.redraws:
            self._draw(generator)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator | None = None) -> None:
        R = self.projection

        def normal(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, device=R.device, dtype=torch.float32)
            return x.to(torch.promote_types(R.dtype, torch.float32))

        rows = normal(self.m, self.d_key)
        if self.orthogonal:
            # A Gaussian row is a uniform direction times the norm of another Gaussian row.
            blocks = normal(-(-self.m // self.d_key), self.d_key, self.d_key)
            directions = orthonormal_rows(blocks, min(self.m, self.d_key)).flatten(0, 1)[: self.m]
            rows = directions * rows.norm(dim=-1, keepdim=True)
        R.copy_(rows)

    @property
    def kernel(self) -> str | None:  # type: ignore[override]
        """The map as kernels know it, unless features are stabilised by their largest entry."""
        return None if self.stabilize else "favor"

    @property
    def vectors(self) -> Tensor:
        """The random vectors for x as it comes, (m, d_key), at least float32; later draws leave them as they are."""
        R = self.projection
        return R.to(torch.promote_types(R.dtype, torch.float32)) * self.inner

    def map(self, x: Tensor) -> Tensor:
        return self.scaled(x) if self.stabilize else features.favor(x, self.vectors, self.inner)

    def scaled(self, x: Tensor) -> Tensor:
        return features.favor_scaled(x, self.vectors)
