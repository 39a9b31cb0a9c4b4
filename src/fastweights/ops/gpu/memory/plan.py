"""Grids and arguments of the kernels: what follows from shapes, strides and dtypes is worked out once, in a `Plan`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastweights.ops.features import Features
from fastweights.ops.gpu.memory.kernels.backward import walk_backward
from fastweights.ops.gpu.memory.kernels.chunk_gradients import chunk_gradients
from fastweights.ops.gpu.memory.kernels.forward import invert_chunks, walk_forward
from fastweights.ops.gpu.memory.launcher import MOST_SHAPES, Constants, Start, kind_of, paced, side_by_side
from fastweights.ops.gpu.memory.strides import REACH, Gates, addressable, even, in_units, ready, strides_of
from fastweights.ops.gpu.memory.variants import (
    HALF,
    ChunkedWalk,
    RecurrentWalk,
    SplitWalk,
    Variant,
    kept_shapes,
    operand_dtype,
    power_of_two,
)

# Kinds of dy that a plan is ready for at a time.
MOST_GRADIENTS = 64

_NO_ROOM = ((0,), (1,))

# Of q, k, v, the gates and, if it is wanted, W.
Gradients = tuple[Tensor, Tensor, Tensor, Gates, Tensor | None]
# A launch, and its tensors before dq and dk and after.
Left = tuple[Start, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]

TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _token_walk(back: bool) -> Any:
    """Imported for those that need it: what Gluon is may change with any version of Triton."""
    from fastweights.ops.gpu.memory.kernels import recurrent_backward as token_backward
    from fastweights.ops.gpu.memory.kernels import recurrent_forward as token_forward

    return token_backward.walk_tokens_backward if back else token_forward.walk_tokens_forward


def _both_ways(config: Variant, unit: int) -> bool:
    """Whether walks load tiles both ways: not where strides make for loads of single entries, which are many."""
    return isinstance(config, ChunkedWalk) and config.both_ways and unit > 1


def _type_of(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def _room(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and its strides: with both at hand, torch takes two thirds of the time to find memory."""
    return shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


class Plan:
    """How to walk: what shapes, strides, dtypes and the configuration decide, once for all calls that share them.

    Tensors are passed in the order q, k, v, a, e, w; strides that kernels cannot take are made contiguous first. Where
    sequences are `grouped`, cu_seqlens says where groups of whole chunks begin, with all sequences in a row. Only walks
    look at that: kernels over chunks side by side find the same chunks without.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        N: int,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
        wide: torch.dtype,
        tied: bool,
        config: Variant,
        features: Features,
        grouped: bool,
    ) -> None:
        # Walks token by token count entries from the first token.
        self.reach = max(REACH, q.shape[1]) if isinstance(config, RecurrentWalk) else REACH
        inputs = ready(self.reach, q, k, v, *gates)
        # Nobody writes or reads it: it stands for states that are not there.
        self.nothing = torch.empty(1, dtype=wide, device=q.device)
        self.dtype, self.wide, self.tied, self.config, self.features = dtype, wide, tied, config, features
        (B, T, self.H, R), self.M = q.shape, v.shape[3]
        self.T, self.N, self.D, self.device, self.index = T, N, features.size(R), q.device, q.device.index
        self.untouched = all(x is y for x, y in zip(inputs, (q, k, v, *gates), strict=True))
        q, k, v, a, e, w = inputs
        self.y_room, self.W_room = _room(tuple(v.shape)), _room((N, self.H, self.D, self.M))
        self.q_room, self.gate_room = _room(tuple(q.shape)), _room((B, T, self.H))
        self.q_dtype, self.gate_dtypes = q.dtype, (_type_of(a), _type_of(e), _type_of(w))
        self.kept_dtype = operand_dtype(q.dtype, wide, config)
        shape = (B, T, self.H, self.D)
        erases = e is not None
        packed = None if grouped else cu_seqlens
        kept = (kept_shapes(shape, self.M, erases, packed, keep, config) for keep in (False, True))
        self.kept_rooms = tuple(tuple(_room(shape) for shape in shapes) for shapes in kept)
        self.slots = self.kept_rooms[1][0][0][0]
        self.prepared = config.prepared and e is not None
        self.fused = not isinstance(config, SplitWalk)
        self.separate = not self.fused and (tied or w is not None or self.kept_dtype != v.dtype)
        self.gate_strides = even((a, e, w), reach=self.reach)[1]
        self.raw_strides = strides_of(q, k, v)
        unit, strides = in_units(self.raw_strides)
        self.strides = (*strides, *self.gate_strides)
        self.grouped, self.bounds_dtype, self.sequences = grouped, _type_of(cu_seqlens), B if grouped else N
        self.packed = packed is not None
        self.constants = {
            "UNIT": unit,
            "H": self.H,
            "R": R,
            "D": self.D,
            "M": self.M,
            "C": config.chunk,
            "BLOCK_R": power_of_two(R),
            "BLOCK_D": power_of_two(self.D),
            "DECAY": a is not None,
            "ERASE": e is not None,
            "WRITE": w is not None,
            "TIED": tied,
            "PACKED": cu_seqlens is not None,
            "GROUPED": grouped,
            "MAP": features.map,
            "SUM": bool(features.sum),
            "TWICE": _both_ways(config, unit),
            "LOGITS": bool(features.logits),
            "OPERAND": TYPES[self.kept_dtype],
            "ACC": TYPES[wide],
            "PRECISION": "ieee" if config.precision == HALF else config.precision,
        }
        if isinstance(config, RecurrentWalk):
            self.constants |= {"LANES": config.lanes}
            self.block = power_of_two(self.M)
        elif isinstance(config, ChunkedWalk):
            self.constants |= {"GATHER": config.gather, "AHEAD": config.prefetch, "SOLVE": config.solve}
            self.block = min(config.columns, power_of_two(self.M))
        kinds = (q.dtype, dtype, wide, *self.gate_dtypes, self.bounds_dtype, grouped)
        self.depends_on = (q.device.index, *kinds, self.H, R, self.M, unit, self.strides, tied, config, features)
        self.invert = self._start(
            invert_chunks,
            self.kept_rooms[1][1][0][0] * self.H,
            (*self.strides[2:4], *self.gate_strides),
            {"BLOCK_D": self._key_tile(), "PACKED": self.packed},
            paced(config.invert_warps if isinstance(config, SplitWalk) else 1, 1),
        )
        self.walks = {read: self._forward_walk(read) for read in (True, False)}
        self.backs: dict[Any, tuple[Start, Start | None]] = {}
        self.compiled_ahead = False

    def _start(
        self,
        kernel: Any,
        grid: int,
        strides: tuple[int, ...],
        more: Constants,
        pace: dict[str, int],
        *depends_on: Any,
    ) -> Start:
        return Start(
            kernel,
            (*self.depends_on, *depends_on),
            grid,
            strides,
            lambda: self.constants | more,
            pace,
            self.device,
        )

    def _key_tile(self) -> int:
        """Features of the keys that launches over chunks take at a time."""
        if isinstance(self.config, SplitWalk):
            return min(self.config.key_tile, power_of_two(self.D))
        return power_of_two(self.D) if self.features.map else 16

    def _programs(self, block: int) -> int:
        return self.N * self.H * -(-self.M // block)

    def _forward_walk(self, read: bool) -> Start:
        stages = self.config.forward_stages
        more = {"BLOCK_M": self.block, "PREPARED": self.prepared, "READ": read}
        more |= {"STAGES": stages, "WARPS": self.config.forward_warps}
        kernel = _token_walk(back=False) if isinstance(self.config, RecurrentWalk) else walk_forward
        pace = paced(self.config.forward_warps, stages)
        return self._start(kernel, self._programs(self.block), self.strides, more, pace, read)

    def forward(
        self,
        inputs: Sequence[Any],
        W: Tensor | None,
        cu_seqlens: Tensor | None,
        keep: bool,
        read: bool = True,
        inverses: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """y, the final W, and where they are kept the states before each chunk, the chunks' inverses and the errors.

        Without `read`, y is the values. Inverses that are known already may be given.
        """
        if self.index is not None and self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self.forward(inputs, W, cu_seqlens, keep, read, inverses)
        if not self.untouched:
            inputs = ready(self.reach, *inputs)
        q, k, v, a, e, w = inputs
        device = self.device
        y = torch.empty_strided(*self.y_room, dtype=self.dtype, device=device) if read else v
        W_end = torch.empty_strided(*self.W_room, dtype=self.wide, device=device)
        given = int(W is not None)
        W = self.nothing if W is None else W.contiguous()
        kept = self.kept_rooms[keep]
        states = torch.empty_strided(*kept[0], dtype=self.kept_dtype, device=device)
        if inverses is None:
            inverses = torch.empty_strided(*kept[1], dtype=self.kept_dtype, device=device)
            if self.prepared:
                self.invert((k, a, e, cu_seqlens if self.packed else None, inverses), self.sequences, self.T)
        errors = torch.empty_strided(*kept[2], dtype=self.kept_dtype, device=device)
        tensors = (q, k, v, a, e, w, W, cu_seqlens, y, W_end, states, inverses, errors)
        self.walks[read](tensors, self.T, int(keep), given)
        return y, W_end, states, inverses, errors

    def _backward_starts(self, dy: Tensor, only_state: bool) -> tuple[Start, Start | None]:
        """The walk back, and the launch for what is left by it, if any, for dy with these strides."""
        config = self.config
        unit, strides = in_units((*self.raw_strides, *strides_of(dy)))
        strides = (*strides, *self.gate_strides)
        fused = self.fused and not only_state
        block = power_of_two(self.M) if fused else self.block
        more = {"BLOCK_M": block, "FUSED": fused, "ONLY": only_state, "RIGHT": self.separate}
        more |= {"UNIT": unit, "TWICE": _both_ways(config, unit)}
        more |= {"STAGES": config.backward_stages, "WARPS": config.backward_warps}
        pace = paced(config.backward_warps, config.backward_stages)
        key = (dy.dtype, unit, strides, only_state)
        kernel = _token_walk(back=True) if isinstance(config, RecurrentWalk) else walk_backward
        walk = self._start(kernel, self._programs(block), strides, more, pace, *key)
        if not isinstance(config, SplitWalk):
            return walk, None
        batch = config.chunks_per_program
        blocks = {"BLOCK_D": self._key_tile(), "BLOCK_M": power_of_two(self.M), "UNIT": unit}
        blocks |= {"BATCH": batch, "TWICE": batch > 1 and _both_ways(config, unit), "PACKED": self.packed}
        several = self.slots if self.packed else -(-self.T // config.chunk)
        programs = -(-several // batch) * self.H * (1 if self.packed else self.sequences)
        pace = paced(config.gradient_warps, config.gradient_stages)
        return walk, self._start(chunk_gradients, programs, strides, blocks, pace, *key)

    def compile_ahead(self, back: bool) -> None:
        """Before the first call, compile all that it will run side by side, with `back` what a backward pass will, too.

        What fails shall fail where it is run.
        """
        if self.compiled_ahead:
            return
        self.compiled_ahead = True
        if self.index is not None and not self.walks[True].known and not torch.cuda.is_current_stream_capturing():
            with torch.cuda.device(self.index):
                side_by_side(lambda: self._compile(back))

    def _compile(self, back: bool) -> list[Any]:
        """All kernels that a forward pass needs, and with `back` a backward pass with contiguous dy; none is run."""
        q, kept, wide = self.q_dtype, self.kept_dtype, self.wide
        a, e, w = self.gate_dtypes
        bounds, packed, groups = self.bounds_dtype, self.bounds_dtype if self.packed else None, self.grouped
        found = []
        if self.prepared:
            found.append(self.invert.compile((q, a, e, packed, kept), self.sequences, self.T))
        for read in (True, False) if groups else (True,):
            kinds = (q, q, q, a, e, w, wide, bounds, self.dtype if read else q, wide, kept, kept, kept)
            found.append(self.walks[read].compile(kinds, self.T, 1, 1))
        if not back:
            return found
        dy = torch.empty(self.y_room[0], dtype=self.dtype, device="meta")
        given = (q, q, q, a, e, w)
        right = kept if self.separate else q
        for only_state in (True, False) if groups else (False,):
            walk, chunks = self._backward_starts(dy, only_state)
            rest = (kept, kept, kept, self.dtype, wide, q, q, q, a, e, w, wide, kept, right)
            found.append(walk.compile((*given, bounds, *rest), self.T, 1, 1))
        if chunks is not None:
            gradients = (q, q, a, e, w, kept, right)
            found.append(chunks.compile((*given, packed, kept, kept, self.dtype, *gradients), self.sequences, self.T))
        return found

    def backward(
        self,
        inputs: Sequence[Any],
        dy: Tensor,
        dW_end: Tensor | None,
        states: Tensor,
        inverses: Tensor,
        errors: Tensor,
        cu_seqlens: Tensor | None,
        wants_state: bool,
    ) -> Gradients:
        """Gradients of q, k, v, the gates and, if it is wanted, W."""
        if self.index is not None and self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self.backward(inputs, dy, dW_end, states, inverses, errors, cu_seqlens, wants_state)
        return self.finish(*self.walk_back(inputs, dy, dW_end, states, inverses, errors, cu_seqlens, wants_state))

    def walk_back(
        self,
        inputs: Sequence[Any],
        dy: Tensor,
        dW_end: Tensor | None,
        states: Tensor,
        inverses: Tensor,
        errors: Tensor,
        cu_seqlens: Tensor | None,
        wants_state: bool,
        only_state: bool = False,
    ) -> tuple[Gradients, Left | None]:
        """Start the walk back: the gradients, and what is left for `finish`, which does not take dW_end.

        `only_state` leaves all gradients but that of W undone.
        """
        key = (dy.stride(), dy.dtype, only_state)
        if key not in self.backs:
            if (aligned := addressable(dy, self.reach)) is not dy:
                kept = (states, inverses, errors)
                return self.walk_back(inputs, aligned, dW_end, *kept, cu_seqlens, wants_state, only_state)
            if len(self.backs) >= MOST_GRADIENTS:
                self.backs.clear()
            self.backs[key] = self._backward_starts(dy, only_state)
        walk, chunks = self.backs[key]
        if not self.untouched:
            inputs = ready(self.reach, *inputs)
        q, k, v, a, e, w = inputs
        device = self.device
        room, gate_room = (_NO_ROOM, _NO_ROOM) if only_state else (self.y_room, self.gate_room)
        dv = torch.empty_strided(*room, dtype=self.q_dtype, device=device)
        # A second launch writes dq and dk: they get memory when the first does not need its own any more.
        split = chunks is not None and not only_state
        dq = dv if split or only_state else torch.empty_strided(*self.q_room, dtype=self.q_dtype, device=device)
        dk = dv if split or only_state else torch.empty_strided(*self.q_room, dtype=self.q_dtype, device=device)
        da, de, dw = (
            None if kind is None else torch.empty_strided(*gate_room, dtype=kind, device=device)
            for kind in self.gate_dtypes
        )
        dW = torch.empty_strided(*self.W_room, dtype=self.wide, device=device) if wants_state else self.nothing
        final = self.nothing if dW_end is None else dW_end.contiguous()
        dstates = torch.empty_like(states) if split else states
        # The second launch reads the right side's gradient as an operand. dv will do where it is that, unrounded.
        dright = torch.empty_strided(*room, dtype=self.kept_dtype, device=device) if self.separate else dv
        given = (q, k, v, a, e, w, cu_seqlens, states)
        walk(
            (*given, inverses, errors, dy, final, dq, dk, dv, da, de, dw, dW, dstates, dright),
            self.T,
            int(dW_end is not None),
            int(wants_state),
        )
        gradients = (dq, dk, dv, (da, de, dw), dW if wants_state else None)
        if chunks is None or only_state:
            return gradients, None
        packed = cu_seqlens if self.packed else None
        return gradients, (chunks, (q, k, v, a, e, w, packed, states, errors, dy), (da, de, dw, dstates, dright))

    def finish(self, gradients: Gradients, left: Left | None) -> Gradients:
        """The gradients when everything is started."""
        if left is None:
            return gradients
        chunks, given, written = left
        dq = torch.empty_strided(*self.q_room, dtype=self.q_dtype, device=self.device)
        dk = torch.empty_strided(*self.q_room, dtype=self.q_dtype, device=self.device)
        chunks((*given, dq, dk, *written), self.sequences, self.T)
        return dq, dk, *gradients[2:]


_plans: dict[tuple[Any, ...], Plan] = {}


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    N: int,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
    wide: torch.dtype,
    tied: bool,
    config: Variant,
    features: Features,
    grouped: bool = False,
) -> Plan:
    """The plan for these shapes, strides and dtypes."""
    a, e, w = gates
    shapes = (q.shape, q.stride(), k.stride(), v.shape, v.stride(), kind_of(a), kind_of(e), kind_of(w))
    key = (*shapes, N, kind_of(cu_seqlens), q.dtype, q.device, dtype, wide, tied, config, features, grouped)
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= MOST_SHAPES:
            _plans.clear()
        _plans[key] = found = Plan(q, k, v, gates, N, cu_seqlens, dtype, wide, tied, config, features, grouped)
    return found
