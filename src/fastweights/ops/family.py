"""Rules of the family on a backend that knows the recurrence, and attention normalisation at no cost in kernels.

A backend supplies `recurrence`, which computes for per-step coefficients a, e, w (None: 1, 0, 1)

    W_t = a_t W_{t-1} - e_t (a_t W_{t-1} k_t) k_t^T + w_t v_t k_t^T,   y_t = W_t q_t.

Attention normalisation, Eqs. 18-19 and 26-28, needs z_t·q_t for the read-out and, where the rule removes,
a_t z_{t-1}·k_t for the read-back. Both are the same recurrence with a single value that is always 1.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastweights.ops.normalization import safe_divide
from fastweights.ops.rules import COMPUTED, Rule, Source
from fastweights.ops.spec import Executable, Inputs, Spec

Optional3 = tuple[Tensor | None, Tensor | None, Tensor | None]


class Recurrence(Protocol):
    """Computes y (B, T, H, M) in `dtype` and the final W (N, H, D, M) for coefficients (B, T, H); W None is zeros.

    The decays a may also be one per key channel, (B, T, H, D), for backends that do not refuse that.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor | None,
        e: Tensor | None,
        w: Tensor | None,
        W: Tensor | None,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]: ...


def outside(rule: Rule) -> str | None:
    """Say why a rule has no recurrence of this form; None where it has."""
    if rule.coefficients is None:
        return f"rule {rule.name!r} is outside the family W = aW - e(aWk)k^T + w v k^T"
    return None


def executable(spec: Spec, *recurrences: Recurrence, most: int | None = None, logs: bool = False) -> Executable:
    """Return what runs calls of this spec; the other arguments are those of `run`."""
    if spec.normalized:
        return lambda inputs: run(inputs, *recurrences, most=most, logs=logs)
    recurrence, coefficients, dtype = recurrences[0], coefficients_for(spec, logs), spec.dtype

    def run_recurrence(inputs: Inputs) -> tuple[Tensor, Tensor, None]:
        a, e, w = coefficients(inputs)
        y, W = recurrence(inputs.q, inputs.k, inputs.v, a, e, w, inputs.W, inputs.cu_seqlens, dtype)
        return y, W, None

    return run_recurrence


def run(
    inputs: Inputs, *recurrences: Recurrence, most: int | None = None, logs: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute y, the final W and z of a rule of the family.

    `recurrences` are one for each of `parts`, in its order, or one for all; `most` is how many values they can have,
    and `logs` says that they take natural logarithms of decays.
    """
    wide = inputs.state_dtype
    decay, e, w = coefficients_of(inputs.rule, inputs.gates, inputs.features.logits, wide, logs)
    a = _with_starts(inputs, decay, logs)
    if not inputs.normalized:
        y, W = recurrences[0](inputs.q, inputs.k, inputs.v, a, e, w, inputs.W, inputs.cu_seqlens, inputs.q.dtype)
        return y, W, None
    if e is None:
        y, total, W, z = _run_adding(inputs.expanded(), recurrences, a, w, most)
    else:
        y, total, W, z = _run_erasing(inputs.expanded(), recurrences, (a, e, w), decay is not None, logs)
    return safe_divide(y, total).to(inputs.q.dtype), W, z


def _run_adding(
    inputs: Inputs, recurrences: tuple[Recurrence, ...], a: Tensor | None, w: Tensor | None, most: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y before its division, what it is divided by, W and z, by a rule that only adds."""
    q, k, v, packed, wide = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.state_dtype
    W, z = inputs.initial_state()
    assert z is not None
    one, common = torch.ones_like(v[..., :1]), _common(v)
    if common is not None:
        v, W = (v - common).to(v.dtype), W - _outer(z, common)
    if most == v.shape[-1]:
        y, W = recurrences[0](q, k, v, a, None, w, W, packed, wide)
        total, Z = recurrences[-1](q, k, one, a, None, w, z[..., None], packed, wide)
        z = Z[..., 0]
    else:
        # The accumulator is one more value column.
        v, W = torch.cat([v, one], -1), torch.cat([W, z[..., None]], -1)
        y, W = recurrences[0](q, k, v, a, None, w, W, packed, wide)
        y, total, W, z = y[..., :-1], y[..., -1:], W[..., :-1], W[..., -1]
    if common is not None:
        y, W = y + total * common, W + _outer(z, common)
    return y, total, W, z


def _run_erasing(
    inputs: Inputs, recurrences: tuple[Recurrence, ...], coefficients: Optional3, fades: bool, logs: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same by a rule that also erases; `fades` says whether it has a decay of its own."""
    q, k, v, packed, wide = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.state_dtype
    recall, accumulate, read = recurrences if len(recurrences) == 3 else recurrences * 3
    (a, e, w), (W, z) = coefficients, inputs.initial_state()
    assert e is not None and z is not None
    # What everything is divided by is computed from wide numbers: its errors would be those of all gradients.
    wide_q, wide_k, one = q.to(wide), k.to(wide), torch.ones_like(v[..., :1], dtype=wide)
    if fades:
        # So is what is divided: a decay changes both alike, and its gradient is the little by which it does not.
        q, k, v = wide_q, wide_k, v.to(wide)
    # a_t z_{t-1} obeys the recurrence with each key one step late.
    late = _late(wide_k, packed, inputs.starts)
    weight = a.exp() if logs and a is not None else a
    if weight is not None and weight.dim() == 4:
        late, weight = weight * late, None
    recalled, _ = recall(wide_k, late, one, a, None, weight, z[..., None], packed, wide)
    total, Z = accumulate(wide_q, wide_k, one, a, None, None, z[..., None], packed, wide)
    y, W = read(q, k, v, a, safe_divide(e, recalled[..., 0]), w, W, packed, wide)
    return y, total, W, Z[..., 0]


# Values have something in common where their mean is at least `_COMMON` times the root of their mean square. One that
# stands out among `_MANY` or more does not make it so: values before it must not be rounded as it is.
_COMMON, _MANY = 0.5, 16


def _common(v: Tensor) -> Tensor | None:
    """Return the mean (B, 1, H, M) of 16-bit values (B, T, H, M), or 0 where it is small; None for few or wider ones.

    An additive memory of v - c, with c z^T added to it, is that of v, whatever c. The gradient of a query is the
    difference of W dy and z (dy·y), over z·q. Where values have a mean these are nearly the same, and of their 16 bits
    little is left; those of v - c are not.
    """
    if v.element_size() > 2 or v.shape[1] < _MANY:
        return None
    wide = v.detach().float()
    mean, square = wide.mean(1, keepdim=True), wide.square().mean(1, keepdim=True)
    # Also where either is no number: it must not reach tokens before the one that has none.
    return mean.where(mean.square() >= _COMMON**2 * square, 0.0).nan_to_num(0, 0, 0)


def _outer(z: Tensor, c: Tensor) -> Tensor:
    """Compute z c^T, (N, H, D, M); packed sequences share one c."""
    return z.unsqueeze(-1) * c.squeeze(1).unsqueeze(-2)


def coefficients_for(spec: Spec, logs: bool = False) -> Callable[[Inputs], Optional3]:
    """Return what gives a, e and w of calls of this spec, or their logits where the gates are logits.

    Where two are one gate they are one and the same tensor. With `logs`, a is its logarithm.
    """
    rule, logits, wide = spec.rule, spec.features.logits, spec.state_dtype
    sources = rule.sources[:3]
    ready = logits or all(dtype == wide for _, _, dtype, *_ in spec.gates)
    computed = logs or spec.logarithms or spec.starts is not None
    computed = computed or any(source == COMPUTED or source.complement for source in sources if source)
    if spec.eager and ready and not computed:
        a, e, w = (source.gate if source else "" for source in sources)
        return lambda inputs: (inputs.gates.get(a), inputs.gates.get(e), inputs.gates.get(w))

    def compute(inputs: Inputs) -> Optional3:
        a, e, w = coefficients_of(rule, inputs.gates, logits, wide, logs)
        return _with_starts(inputs, a, logs), e, w

    return compute


def _with_starts(inputs: Inputs, a: Tensor | None, logs: bool = False) -> Tensor | None:
    """Return the rule's decay, and 0 where a text starts: a memory that fades to nothing is empty, exactly.

    With `logs` these are logarithms.
    """
    if inputs.starts is None:
        return a
    if a is None:
        a = torch.ones(inputs.v.shape[:3], dtype=inputs.state_dtype, device=inputs.q.device)
    # Not a product: the gradient of a decay at which the memory was emptied is 0, whatever the memory held.
    starts = inputs.starts.reshape(*inputs.starts.shape, *(1,) * (a.dim() - 2))
    return a.masked_fill(starts, LOG_OF_ZERO if logs else 0)


# Stands for minus infinity where decays are logarithms: its exponential is 0 in every dtype, and sums of it are finite.
# Recurrences that take logarithms take no less than this for what is less.
LOG_OF_ZERO = -2000.0


def in_logarithms(spec: Spec) -> bool:
    """Return whether the decays of a call come as logarithms, and can go to a recurrence as such."""
    rule, names = spec.rule, spec.rule.logarithms
    fading = [names[name] for name, *_ in spec.gates if name in names]
    return len(fading) == 1 and rule.sources.decay == Source(fading[0]) and fading[0] not in rule.heads_only


def coefficients_of(
    rule: Rule, gates: dict[str, Tensor], logits: bool, wide: torch.dtype, logs: bool = False
) -> Optional3:
    """Return a, e and w of gates, which first become `wide` unless they are logits. With `logs`, a is its logarithm."""
    assert rule.coefficients is not None
    names, sources = rule.logarithms, rule.sources[:3]
    if logits:
        # What has the sigmoid 1 - sigmoid(x) is -x.
        values = {x: -gates[x.gate] if x.complement else gates[x.gate] for x in sources if x is not None}
        a, e, w = (None if x is None else values[x] for x in sources)
        return a, e, w
    # The gates are small next to q, k and v, and 1 - beta has no digits to lose.
    gates = {name: x if x.dtype is wide else x.to(wide) for name, x in gates.items()}
    # A logarithm may stand for a decay on which nothing else depends.
    gates = {names.get(name, name): x for name, x in gates.items()} if logs else rule.gates_from(gates)
    return _computed(rule.coefficients, gates)


def _computed(coefficients: Callable[..., Optional3], gates: dict[str, Tensor]) -> Optional3:
    """Return the coefficients (B, T, H) of gates (B, T, H), where some of both may be (B, T, H, D)."""
    if all(x.dim() == 3 for x in gates.values()):
        return coefficients(**gates)
    D = max(x.shape[-1] for x in gates.values() if x.dim() == 4)
    a, erase, write = coefficients(**{name: x if x.dim() == 4 else x.unsqueeze(-1) for name, x in gates.items()})
    # One per key stays that for keys of one entry, too: kernels for such decays take no others.
    a = a if a is None or a.shape[-1] == D else a.squeeze(-1)
    e, w = (None if x is None else x.squeeze(-1) for x in (erase, write))
    # Where both are one tensor, recurrences see it.
    return a, e, e if write is erase else w


def takes_logits(rule: Rule) -> bool:
    """Return whether the coefficients are gates, or 1 minus gates, so that their logits can stand for them."""
    return COMPUTED not in rule.sources


class RecurrenceForm(NamedTuple):
    """A recurrence: the dtype of keys, the size of values, whether it has a, e and w, and whether w is e."""

    dtype: torch.dtype
    M: int
    decay: bool
    erase: bool
    write: bool
    tied: bool


def coefficients_there(spec: Spec) -> tuple[bool, bool, bool, bool]:
    """Return whether a call has a, e and w, and whether w is e, which then stands for both."""
    a, e, w, tied = spec.rule.sources
    return a is not None or spec.starts is not None, e is not None, w is not None and not tied, tied


def parts(spec: Spec, most: int | None = None) -> list[RecurrenceForm]:
    """List the recurrences that `run` makes, in its order."""
    dtype, M, wide = spec.dtype, spec.M, spec.state_dtype
    decay, erase, write, tied = coefficients_there(spec)
    if not spec.normalized:
        return [RecurrenceForm(dtype, M, decay, erase, write, tied)]
    if not erase:
        sizes = (M, 1) if most == M else (M + 1,)
        return [RecurrenceForm(dtype, size, decay, False, write, False) for size in sizes]
    divisors = [RecurrenceForm(wide, 1, decay, False, write_decay, False) for write_decay in (decay, False)]
    dividend = wide if spec.rule.sources.decay else dtype
    return [*divisors, RecurrenceForm(dividend, M, decay, True, write or tied, False)]


def _late(k: Tensor, cu_seqlens: Tensor | None, starts: Tensor | None) -> Tensor:
    """Return k one step later, zero at the start of each sequence and of each text."""
    late = pad(k, (0, 0, 0, 0, 1, 0))[:, :-1]
    if cu_seqlens is not None:
        bounds = torch.zeros(k.shape[1] + 1, dtype=torch.bool, device=k.device)
        bounds = bounds.index_fill(0, cu_seqlens.long(), True)[None, :-1]
        starts = bounds if starts is None else starts | bounds
    return late if starts is None else late.masked_fill(starts[..., None, None], 0)
