"""What a call of the memory is, its tensors and a hashable description of them, and what a backend answers to it.

B batch, T time, H heads, D = d_dot (keys and queries after phi), M = d_value, N = B or the number of packed sequences.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fastweights.common.transforms import is_transformed
from fastweights.ops.eager import PLAIN_TENSORS, is_watched
from fastweights.ops.features import PLAIN, Features, MapFeatures
from fastweights.ops.fused.features import map_heads
from fastweights.ops.rules import Rule


@dataclass(eq=False, slots=True)
class Inputs:
    """The tensors of one call.

    q, k (B, T, H, D), v (B, T, H, M), gates (B, T, H) each, or (B, T, H, D) where a gate is one per key channel; some
    under the names of their logarithms. v, gates, W and z may have a multiple of the heads of q and k. W (N, H, D, M)
    and z (N, H, D) are None for zeros. Where `mask` (B, T) is False, q, k and v are zero and the gates idle already;
    only a rule outside the family has to look at it. Where `starts` (B, T) is True, W and z are emptied before that
    token. q, k and the gates may be raw: `features` are what they have to go through first, and D is the size they have
    then. With `in_place` the memory of W and z may be used again for what they become.
    """

    rule: Rule
    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    W: Tensor | None = None
    z: Tensor | None = None
    cu_seqlens: Tensor | None = None
    mask: Tensor | None = None
    starts: Tensor | None = None
    features: Features | MapFeatures = PLAIN
    in_place: bool = False
    attention: bool | None = None

    @property
    def normalized(self) -> bool:
        """Whether attention normalisation is asked for; where `attention` is None, a z says so."""
        return self.z is not None if self.attention is None else self.attention

    def mapped(self) -> Self:
        """Return the same with keys, queries and gates as they go into the memory.

        What a memory under attention normalisation is divided by may be next to nothing, and 16 bits have no room for
        the gradients that mapped keys and queries then have, although raw ones have moderate ones. So all become
        float32 there, and y as well; but for GPUs, on which products of 16 bits are several times faster.
        """
        if self.features == PLAIN:
            return self
        dtype = self.state_dtype if self.normalized and not self.q.is_cuda else self.v.dtype
        q, k = map_heads(self.q, self.k, self.features, divided=self.normalized, dtype=dtype)
        logs = self.rule.logarithms
        gates = {name: gate if name in logs else self.features.gate(gate) for name, gate in self.gates.items()}
        return replace(self, q=q, k=k, v=self.v.to(dtype), gates=gates, features=PLAIN)

    def masked(self) -> Self:
        """Return the same with nothing to read or write where the mask is False."""
        if self.mask is None:
            return self
        hidden = ~self.mask[..., None]
        q, k, v = (x.masked_fill(hidden.unsqueeze(-1), 0) for x in (self.q, self.k, self.v))
        gates = {
            name: x.masked_fill(hidden if x.dim() == 3 else hidden.unsqueeze(-1), self.rule.idle[name])
            for name, x in self.gates.items()
        }
        return replace(self, q=q, k=k, v=v, gates=gates)

    def expanded(self) -> Self:
        """Return the same with a head of q and k for each head of v."""
        n = self.v.shape[2] // self.q.shape[2]
        if n == 1:
            return self
        return replace(self, q=self.q.repeat_interleave(n, 2), k=self.k.repeat_interleave(n, 2))

    @property
    def state_dtype(self) -> torch.dtype:
        """What state and sums are kept in: at least float32."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def initial_state(self) -> tuple[Tensor, Tensor | None]:
        """Return W and, under attention normalisation, z before the first token."""
        W, z = self.W, self.z
        if W is None:
            N = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1
            shape = (N, self.v.shape[2], self.features.size(self.q.shape[3]), self.v.shape[3])
            W = torch.zeros(shape, dtype=self.state_dtype, device=self.q.device)
        if self.normalized and z is None:
            z = torch.zeros(W.shape[:3], dtype=W.dtype, device=W.device)
        return W, z

    def unpack(self) -> Iterator[Self]:
        """Yield the packed sequences one by one, each a batch of one."""
        assert self.cu_seqlens is not None
        W, z = self.initial_state()
        for i, (start, end) in enumerate(pairwise(self.cu_seqlens.tolist())):
            span = slice(start, end)
            yield replace(
                self,
                q=self.q[:, span],
                k=self.k[:, span],
                v=self.v[:, span],
                gates={name: gate[:, span] for name, gate in self.gates.items()},
                W=W[i : i + 1],
                z=None if z is None else z[i : i + 1],
                mask=None if self.mask is None else self.mask[:, span],
                starts=None if self.starts is None else self.starts[:, span],
                cu_seqlens=None,
            )


# Shape, dtype and device; of heads and gates the strides, too.
Form = tuple[Any, ...]


class Spec(NamedTuple):
    """Everything that checks and the choice of kernels depend on: calls of equal spec run the same way.

    `eager` says that only autograd watches the call, so that kernels may be called directly; whatever traces a call
    has to see custom operators. `transformed` says that torch.func or forward-mode differentiation is at work.
    A spec is made at every call, so it is flat, and tensors are described by plain tuples.
    """

    rule: Rule
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    k: Form
    v: Form
    gates: tuple[Form, ...]
    W: Form | None
    z: Form | None
    cu_seqlens: Form | None
    mask: Form | None
    starts: Form | None
    normalized: bool
    features: Features
    D: int
    gradients: bool
    in_place: bool
    eager: bool
    transformed: bool

    @classmethod
    def of(cls, inputs: Inputs) -> Self:
        """Describe a call."""
        q, k, v, W, z, gates = inputs.q, inputs.k, inputs.v, inputs.W, inputs.z, inputs.gates
        bounds, mask, starts, features = inputs.cu_seqlens, inputs.mask, inputs.starts, inputs.features
        transformed, gradients = is_transformed(), False
        eager = not (transformed or is_watched())
        for x in (q, k, v, W, z, bounds, mask, starts, *gates.values()):
            if x is not None:
                eager = eager and type(x) in PLAIN_TENSORS and not (x.is_neg() or x._is_zerotensor())
                gradients = gradients or x.requires_grad
        gradients = torch.is_grad_enabled() and (gradients or (features is not PLAIN and _learns(features)))
        fields = (
            inputs.rule,
            q.shape,
            q.stride(),
            q.dtype,
            q.device,
            (k.shape, k.dtype, k.device, k.stride()),
            (v.shape, v.dtype, v.device, v.stride()),
            tuple([(name, x.shape, x.dtype, x.device, x.stride()) for name, x in gates.items()]),
            None if W is None else (W.shape, W.dtype, W.device),
            None if z is None else (z.shape, z.dtype, z.device),
            None if bounds is None else (bounds.shape, bounds.dtype, bounds.device),
            None if mask is None else (mask.shape, mask.dtype, mask.device),
            None if starts is None else (starts.shape, starts.dtype, starts.device),
            inputs.normalized,
            features.description,
            features.size(q.shape[3]),
            gradients,
            inputs.in_place,
            eager and not q.is_meta,
            transformed,
        )
        # The class itself would take its fields one by one.
        return cls._make(fields)

    @property
    def state_dtype(self) -> torch.dtype:
        """What state and sums are kept in: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def T(self) -> int:
        """Tokens of a sequence, or of all packed ones together."""
        return self.shape[1]

    @property
    def H(self) -> int:
        """Heads of v, gates and state; those of q and k may be fewer."""
        return int(self.v[0][2])

    @property
    def grouped(self) -> bool:
        """Whether several heads share a head of q and k."""
        return self.shape[2] != self.H

    @property
    def M(self) -> int:
        """The size of a value."""
        return int(self.v[0][3])

    @property
    def N(self) -> int:
        """Sequences."""
        return self.shape[0] if self.cu_seqlens is None else int(self.cu_seqlens[0][0]) - 1

    @property
    def packed(self) -> bool:
        """Whether sequences are packed along time."""
        return self.cu_seqlens is not None

    @property
    def per_key(self) -> bool:
        """Whether a gate is one per key channel."""
        return any(len(shape) == 4 for _, shape, *_ in self.gates)

    @property
    def logarithms(self) -> bool:
        """Whether a gate is given as its natural logarithm."""
        return any(name in self.rule.logarithms for name, *_ in self.gates)

    def mapped(self) -> Self:
        """Describe the same call after `Inputs.mapped`, as far as a choice of kernels depends on it."""
        shape = (*self.shape[:3], self.D)
        return self._with_keys(shape)._replace(features=PLAIN)

    def expanded(self) -> Self:
        """Describe the same call after `Inputs.expanded`."""
        return self._with_keys((*self.shape[:2], self.H, self.shape[3]))

    def _with_keys(self, shape: tuple[int, ...]) -> Self:
        return self._replace(shape=shape, stride=(), k=(shape, self.dtype, self.device, ()))


def _learns(features: Features | MapFeatures) -> bool:
    """Return whether a feature map has parameters of its own that are trained."""
    phi = getattr(features, "phi", None)
    return isinstance(phi, torch.nn.Module) and any(parameter.requires_grad for parameter in phi.parameters())


def checked_bounds(cu_seqlens: Tensor, T: int) -> list[int]:
    """Return the bounds of packed sequences if they rise from 0 to T or less."""
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] > T or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {T} or less, got {bounds[:20]}")
    return bounds


# y (B, T, H, M), W (N, H, D, M) and, under attention normalisation, z (N, H, D).
Executable = Callable[[Inputs], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Refusal:
    """Why a backend does not run a call."""

    reason: str


Prepare = Callable[[Spec], Executable | Refusal]


@dataclass(frozen=True)
class Backend:
    """One way to compute the memory.

    Attributes:
        name: what `backend=` takes.
        description: one line for people.
        prepare: answers a description of a call with what runs such calls, or with a refusal and its reason.
        unavailable: says why this machine cannot run it; None where it can.
        single_tokens: whether "auto" may take it for a call of one token, where there is little to set up for.
    """

    name: str
    description: str
    prepare: Prepare
    unavailable: Callable[[], str | None] = lambda: None
    single_tokens: Callable[[Spec], bool] = lambda spec: True


def mapping_first(prepare: Prepare) -> Prepare:
    """Let a backend that takes mapped keys, queries and gates run calls with any `features`."""
    return lambda spec: prepare(spec) if spec.features == PLAIN else prepare_mapped(prepare, spec)


def prepare_mapped(prepare: Prepare, spec: Spec) -> Executable | Refusal:
    """Return what maps keys, queries and gates, and then runs the call as `prepare` answers for them."""
    answer = prepare(spec.mapped())
    return answer if isinstance(answer, Refusal) else lambda inputs: answer(inputs.mapped())


def expanding_first(prepare: Prepare) -> Prepare:
    """Let a backend that takes as many heads of q and k as of v run calls in which several share one."""

    def prepare_expanded(spec: Spec) -> Executable | Refusal:
        if not spec.grouped:
            return prepare(spec)
        answer = prepare(spec.expanded())
        return answer if isinstance(answer, Refusal) else lambda inputs: answer(inputs.expanded())

    return prepare_expanded
