"""One token, or a few, of each sequence in C++, csrc/step.cpp, with feature maps and gates inside; no gradients.

What follows from shapes, strides and dtypes is worked out once, in a `StepPlan`. A call is little more than the
addresses of its tensors, since the Python around a state of 64 x 64 takes longer than the C++.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.cpu.build import library
from fastweights.ops.cpu.features import MAPS
from fastweights.ops.cpu.views import KINDS, View, rows
from fastweights.ops.family import coefficients_of
from fastweights.ops.rules import COMPUTED
from fastweights.ops.spec import Executable, Inputs, Spec

# Tokens up to which this takes less time than a chunk.
MOST_TOKENS = 8

# FAVOR+ is mapped first: its vectors are no part of a plan.
_MAPS = {name: number for name, number in MAPS.items() if name != "favor"}
_ABSENT, _PLAIN, _COMPLEMENT, _LOGIT, _COMPLEMENT_LOGIT, _LOGARITHM = range(6)


_pack = struct.Struct("13q").pack


class StepPlan(ctypes.Structure):
    """What all calls of a spec have in common."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("N", "T", "H", "group", "R", "D", "M", "nu")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("map", "norm", "wide", "per_key", "normalized")),
        *((name, ctypes.c_int32) for name in ("form_a", "form_e", "form_w")),
        *((name, View) for name in ("q", "k", "v", "a", "e", "w", "y")),
    )


def takes(spec: Spec) -> bool:
    """Return whether calls of a spec are for the step: short, eager, of a rule of the family, without gradients."""
    if not spec.eager or spec.gradients or spec.rule.coefficients is None:
        # Before any look at T: a trace would then hold for so short sequences only.
        return False
    return (MOST_TOKENS if spec.cu_seqlens is None else MOST_TOKENS * spec.N) >= spec.T


def prepare(spec: Spec) -> Executable:
    """Return what runs calls of a spec that `takes` takes."""
    if spec.features.map not in _MAPS:
        run = prepare(spec.mapped())
        return lambda inputs: run(inputs.mapped())
    given = {name for name, *_ in spec.gates}
    sources = [source for source in spec.rule.sources[:3] if source is not None]
    # The C++ knows no 1 - exp(x).
    if any(source == COMPUTED or (source.complement and source.gate not in given) for source in sources):
        return _computed(spec)
    return Step(spec, *_gates(spec, given))


def _gates(spec: Spec, given: set[str]) -> tuple[list[str | None], list[int]]:
    """Return the names under which a, e and w are given, and in which form."""
    logs = {gate: name for name, gate in spec.rule.logarithms.items()}
    names: list[str | None] = []
    forms = []
    for source in spec.rule.sources[:3]:
        if source is None:
            names.append(None)
            forms.append(_ABSENT)
        elif source.gate in given:
            names.append(source.gate)
            forms.append((_LOGIT if spec.features.logits else _PLAIN) + source.complement)
        else:
            names.append(logs[source.gate])
            forms.append(_LOGARITHM)
    return names, forms


def _computed(spec: Spec) -> Executable:
    """Return what computes the coefficients of a rule from its gates first."""
    rule, wide, features = spec.rule, spec.state_dtype, spec.features._replace(logits=False)
    names = [None if source is None else name for name, source in zip("aew", rule.sources, strict=False)]
    forms = [_ABSENT if name is None else _PLAIN for name in names]
    step = Step(spec._replace(features=features, stride=()), names, forms)

    def run(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        logs = rule.logarithms
        opened = {name: x if name in logs else inputs.features.gate(x) for name, x in inputs.gates.items()}
        a, e, w = coefficients_of(rule, opened, False, wide)
        return step.run(inputs, {"a": a, "e": e, "w": w})

    return run


class Step:
    """Runs calls of one spec.

    Args:
        names: under which names a, e and w are given; None where there is none.
        forms: what is given for each.
    """

    def __init__(self, spec: Spec, names: list[str | None], forms: list[int]) -> None:
        self.spec, self.forms = spec, forms
        # A name that no gate has stands for a coefficient that is not there.
        self.a, self.e, self.w = (name or "" for name in names)
        self.function = library().fastweights_step
        self.function.argtypes, self.function.restype = [ctypes.c_char_p, ctypes.c_char_p], None
        self.state, self.wide = (spec.N, spec.H, spec.D, spec.M), spec.state_dtype
        self.normalized, self.in_place = spec.normalized, spec.in_place
        self.plan: bytes | None = None

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return y, W and z after the tokens."""
        if self.plan is None and self.spec.stride:
            # The tensors are as the spec describes them, not made of those, so that all calls share a plan.
            gates = [inputs.gates.get(name) for name in (self.a, self.e, self.w)]
            tensors = inputs.q, inputs.k, inputs.v, *gates
            if all(x is rows(x) for x in tensors):
                self.plan = self.make_plan(*tensors)
        return self.run(inputs, inputs.gates)

    def run(self, inputs: Inputs, gates: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return y, W and z of a call with these gates in place of its own."""
        q, k, v, W, z = inputs.q, inputs.k, inputs.v, inputs.W, inputs.z
        a, e, w = gates.get(self.a), gates.get(self.e), gates.get(self.w)
        plan = self.plan
        if plan is None:
            q, k, v, a, e, w = (rows(x) for x in (q, k, v, a, e, w))
            plan = self.make_plan(q, k, v, a, e, w)
        y = torch.empty_like(v, memory_format=torch.contiguous_format)
        bounds, starts, z_end = inputs.cu_seqlens, inputs.starts, None
        if W is None:
            W_end = torch.empty(self.state, dtype=self.wide)
        else:
            W = W.contiguous()
            W_end = W if self.in_place else torch.empty_like(W)
        if self.normalized:
            z = None if z is None else z.contiguous()
            z_end = z if z is not None and self.in_place else torch.empty(self.state[:3], dtype=self.wide)
        # Where they are made here, they must live until the function returns.
        bounds, starts = None if bounds is None else bounds.long(), None if starts is None else starts.contiguous()
        addresses = _pack(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            0 if a is None else a.data_ptr(),
            0 if e is None else e.data_ptr(),
            0 if w is None else w.data_ptr(),
            0 if W is None else W.data_ptr(),
            0 if z is None else z.data_ptr(),
            y.data_ptr(),
            W_end.data_ptr(),
            0 if z_end is None else z_end.data_ptr(),
            0 if bounds is None else bounds.data_ptr(),
            0 if starts is None else starts.data_ptr(),
        )
        self.function(plan, addresses)
        if self.in_place and W is not None:
            _changed(W_end, z_end)
        return y, W_end, z_end

    def make_plan(self, q: Any, k: Any, v: Any, *gates: Any) -> bytes:
        """Describe tensors as the C++ takes them, but for their addresses."""
        spec, features = self.spec, self.spec.features
        per_key = gates[0] is not None and gates[0].dim() == 4
        sizes = (spec.N, spec.T, spec.H, spec.H // q.shape[2], q.shape[3], spec.D, spec.M, features.nu)
        norm = 1 if features.sum else 2 if features.l2 else 0
        codes = (_MAPS[features.map], norm, self.wide == torch.float64, per_key, spec.normalized)
        (T, H, M) = spec.v[0][1:]
        y = View(None, T * H * M, H * M, M, KINDS[v.dtype], v.element_size())
        views = [View.of(x) for x in (q, k, v, *gates)]
        return bytes(StepPlan(*sizes, features.scale, *codes, *self.forms, *views, y))


def _changed(*tensors: Tensor | None) -> None:
    """Let autograd know that tensors were overwritten, so that whoever still needs them is told."""
    torch.autograd.graph.increment_version([x for x in tensors if x is not None and not x.is_inference()])
