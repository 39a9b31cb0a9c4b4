"""What decides which kernels run, so that each signature is checked once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.ops import family
from fastweights.ops.features import PLAIN, Features
from fastweights.ops.gpu.memory.strides import Gates, per_key
from fastweights.ops.gpu.memory.variants import ChunkedWalk, RecurrentWalk, Variant, to_integers
from fastweights.ops.spec import Spec


class WalkSignature(NamedTuple):
    """What decides which kernels run. `decay`, `erase` and `write` say which coefficients are there.

    D is the size of the keys as they are given, before the map of `features`.
    """

    dtype: torch.dtype
    D: int
    M: int
    decay: bool
    erase: bool
    write: bool
    tied: bool
    packed: bool
    variant: Variant
    features: Features = PLAIN
    per_key: bool = False
    """The decays are one per key channel."""

    @classmethod
    def of(
        cls,
        q: Tensor,
        v: Tensor,
        gates: Gates,
        tied: bool,
        cu_seqlens: Tensor | None,
        variant: Variant,
        features: Features,
    ) -> WalkSignature:
        """The signature of a call."""
        a, e, w = (gate is not None for gate in gates)
        sizes = (q.dtype, q.shape[3], v.shape[3])
        return cls(*sizes, a, e, w, tied, cu_seqlens is not None, variant, features, per_key(gates[0]))

    def __str__(self) -> str:
        grouped = isinstance(self.variant, ChunkedWalk) and self.variant.groups
        form = ", packed" if self.packed else ", in groups" if grouped else ""
        features = self.features.describe(self.D)
        walk = "token by token" if isinstance(self.variant, RecurrentWalk) else f"chunk {self.variant.chunk}"
        return f"{str(self.dtype)[6:]}, {features}, M = {self.M}, {_gates(self)}{form}, {walk}"

    @property
    def key(self) -> str:
        """Its name on disk."""
        return f"{self} {'-'.join(map(str, (*to_integers(self.variant), *self.features)))}"


def _gates(signature: Signature, **more: bool) -> str:
    """Return the names of the coefficients that are there, and of whatever more is."""
    decay = "decay per key" if signature.per_key else "decay"
    named = {decay: signature.decay, "erase": signature.erase, "write": signature.write, "tied": signature.tied}
    return ", ".join(name for name, there in (named | more).items() if there) or "no gates"


class StepSignature(NamedTuple):
    """The same for the kernel that takes one token; `normalized` is attention normalisation."""

    dtype: torch.dtype
    D: int
    M: int
    decay: bool
    erase: bool
    write: bool
    tied: bool
    normalized: bool
    features: Features = PLAIN
    per_key: bool = False

    @classmethod
    def of_tensors(
        cls, q: Tensor, v: Tensor, gates: Gates, tied: bool, normalized: bool, features: Features
    ) -> StepSignature:
        """Return the signature of a call with these tensors."""
        a, e, w = (gate is not None for gate in gates)
        return cls(q.dtype, q.shape[3], v.shape[3], a, e, w, tied, normalized, features, per_key(gates[0]))

    @classmethod
    def of(cls, spec: Spec) -> StepSignature:
        """Return the signature that a call needs."""
        there = family.coefficients_there(spec)
        return cls(spec.dtype, spec.shape[3], spec.M, *there, spec.normalized, spec.features, spec.per_key)

    def __str__(self) -> str:
        gates = _gates(self, z=self.normalized)
        return f"one token, {str(self.dtype)[6:]}, {self.features.describe(self.D)}, M = {self.M}, {gates}"

    @property
    def key(self) -> str:
        """Its name on disk."""
        return f"{self} {'-'.join(map(str, self.features))}"


Signature = WalkSignature | StepSignature
