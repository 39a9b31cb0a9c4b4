"""How to compute a call: everything that follows from shapes, strides and dtypes is worked out once, in a `Plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.causality import Tokens
from fastweights.ops.features import Features
from fastweights.ops.gpu.launcher import Dtypes, Launch, Tensors, dtype_of, kind_of, planned, side_by_side
from fastweights.ops.gpu.memory.buffers import Buffers
from fastweights.ops.gpu.memory.kernels.backward import walk_backward
from fastweights.ops.gpu.memory.kernels.chunk_gradients import chunk_gradients
from fastweights.ops.gpu.memory.kernels.forward import prepare_chunks, walk_forward
from fastweights.ops.gpu.memory.kernels.gradients import key_decay_gradients
from fastweights.ops.gpu.memory.kernels.options import TYPES, Options, map_options
from fastweights.ops.gpu.memory.strides import REACH, Strides, addressable, per_key
from fastweights.ops.gpu.memory.tail import Tail
from fastweights.ops.gpu.memory.variants import (
    HALF,
    PER_KEY_TILE,
    STEEP_WARPS,
    ChunkedWalk,
    RecurrentWalk,
    SplitWalk,
    Variant,
    power_of_two,
)
from fastweights.ops.operator import Gradients, Kept

# Stands for q * γ, k * γ, k * Γ[-1] and γ[-1] where decays are not per key.
NOT_FADED = (None, None, None, None)

# Layouts of dy that a plan keeps launches for at a time.
MOST_GRADIENTS = 64


def _recurrent_kernel(back: bool) -> Any:
    """Import the kernel where it is needed: what Gluon is may change with any version of Triton."""
    from fastweights.ops.gpu.memory.kernels import recurrent_backward, recurrent_forward

    return recurrent_backward.walk_tokens_backward if back else recurrent_forward.walk_tokens_forward


class Plan:
    """How to walk: what shapes, strides, dtypes and the variant decide, once for all calls that share them.

    Where sequences are `grouped`, cu_seqlens says where groups of
    whole chunks begin, with all sequences in a row. Only walks look at that: kernels over chunks side by side find the
    same chunks without.
    """

    def __init__(
        self,
        tokens: Tokens,
        N: int,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
        tied: bool,
        variant: Variant,
        features: Features,
        grouped: bool,
    ) -> None:
        q, _, v, *gates = tokens
        (B, T, H, R), M, D = q.shape, v.shape[3], features.size(q.shape[3])
        wide = torch.promote_types(q.dtype, torch.float32)
        # Recurrent walks count entries from the first token.
        self.layout = Strides(tokens, max(REACH, T) if isinstance(variant, RecurrentWalk) else REACH)
        self.variant, self.device, self.index, self.T = variant, q.device, q.device.index, T
        self.packed = cu_seqlens is not None and not grouped
        self.sequences, self.columns = (B if grouped else N), N * H
        bounds = cu_seqlens if self.packed else None
        self.buffers = Buffers(tokens, (N, H, D, M), bounds, dtype, wide, variant)
        # What the walk back leaves to another launch stands where that will write dv, unless dv is of another dtype.
        # Under decays per key e dR is read there after that, which dv is not where another gate writes.
        a, e, w = gates
        self.per_key = per_key(a)
        apart = self.buffers.kept_dtype != v.dtype or (self.per_key and e is not None and w is not None)
        self.separate = isinstance(variant, SplitWalk) and apart
        self.dtypes = (q.dtype, dtype, wide, self.buffers.kept_dtype)
        self.gate_dtypes = (dtype_of(a), dtype_of(e), dtype_of(w))
        # Walks take decays per key in faded keys and queries.
        self.walked = self.layout
        if self.per_key:
            faded = torch.empty((B, T, H, D), dtype=self.buffers.kept_dtype, device="meta")
            self.walked = Strides((faded, faded, v, None, e, w), self.layout.reach)
        self.bounds_dtype = dtype_of(cu_seqlens)
        self.options = Options(
            **map_options(features, R),
            H=H,
            M=M,
            C=variant.step,
            steps=variant.chunk // variant.step,
            block_R=power_of_two(R),
            block_D=power_of_two(D),
            decay=a is not None and not self.per_key,
            erase=e is not None,
            write=w is not None,
            per_key=self.per_key,
            tied=tied,
            packed=cu_seqlens is not None,
            grouped=grouped,
            prepared=variant.prepared,
            planes=int(variant.prepared) + int(e is not None),
            gather=isinstance(variant, ChunkedWalk) and variant.gather,
            operand=TYPES[self.buffers.kept_dtype],
            acc=TYPES[wide],
            precision="ieee" if variant.precision == HALF else variant.precision,
            solve=variant.solve if isinstance(variant, ChunkedWalk) else "ieee",
        )
        self.prepare = self._prepare() if variant.prepared else None
        self.fade = self._prepare(only_faded=True) if self.per_key else None
        self.walks = {read: self._walk(read) for read in (True, False)}
        gradients = (self.buffers.dq, self.buffers.dq, self.buffers.dv, *self.buffers.gate_gradients)
        self.tail = None if bounds is None else Tail((self.buffers.y,), bounds)
        self.tail_back = None if bounds is None else Tail(gradients, bounds)
        self.backs: dict[Any, tuple[Launch, list[Launch]]] = {}
        self.compiled_ahead = False

    def forward(
        self,
        tokens: Tokens,
        W: Tensor | None,
        cu_seqlens: Tensor | None,
        keep: bool,
        read: bool = True,
        tiles: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return y, the final W and, where they are kept, the chunks' first states and tiles and the tokens' errors.

        Without `read`, y is the values. Tiles that are known already may be given.
        """
        if self.index is not None and self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self.forward(tokens, W, cu_seqlens, keep, read, tiles)
        buffers = self.buffers
        tokens = q, k, v, a, e, w = self.layout.prepare(tokens)
        y = buffers.y() if read else v
        W_end = buffers.state()
        states, errors = (buffers.states(), buffers.errors()) if keep else (buffers.unkept, buffers.unkept)
        faded: Any = buffers.faded() if self.per_key else NOT_FADED
        if tiles is None or self.prepare is None:
            tiles = buffers.tiles() if keep or self.prepare is not None else buffers.unkept
            if self.prepare is not None:
                bounds = cu_seqlens if self.packed else None
                self.prepare((q, k, (a, e), bounds, tiles, faded), self.sequences, self.T)
        if self.per_key:
            tokens = (*faded[:2], v, None, e, w)
        first = buffers.nothing if W is None else W.contiguous()
        tensors = (tokens, faded[2:], first, cu_seqlens, (y, W_end), (states, tiles, errors))
        self.walks[read](tensors, self.T, int(keep), int(W is not None))
        if self.tail is not None:
            self.tail.clear((y,), cu_seqlens, self.T)
        return y, W_end, states, tiles, errors

    def backward(
        self, tokens: Tokens, dy: Tensor, dW_end: Tensor | None, kept: Kept, cu_seqlens: Tensor | None, wants_dW: bool
    ) -> Gradients:
        """Return the gradients of q, k, v, a, e, w and, if it is wanted, W."""
        if self.index is not None and self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self.backward(tokens, dy, dW_end, kept, cu_seqlens, wants_dW)
        return self.walk_back(tokens, dy, dW_end, kept, cu_seqlens, wants_dW)()

    def walk_back(
        self,
        tokens: Tokens,
        dy: Tensor,
        dW_end: Tensor | None,
        kept: Kept,
        cu_seqlens: Tensor | None,
        wants_dW: bool,
        only_state: bool = False,
    ) -> Callable[[], Gradients]:
        """Launch the walk back; return what launches the rest, for which dW_end is not needed, and gives the gradients.

        `only_state` leaves all gradients but that of W undone.
        """
        buffers, (states, tiles, errors) = self.buffers, kept[:3]
        dy, walk, rest = self._back(dy, only_state)
        tokens = q, k, v, a, e, w = self.layout.prepare(tokens)
        walked: Tensors = (tokens, NOT_FADED[2:])
        if self.fade is not None:
            faded = buffers.faded()
            self.fade((q, k, (a, e), cu_seqlens if self.packed else None, tiles, faded), self.sequences, self.T)
            walked = ((*faded[:2], v, None, e, w), faded[2:])
            del faded
        dv = buffers.no_dv() if only_state else buffers.dv()
        # A second launch writes dq and dk: they get memory when the first does not need its own any more.
        split = bool(rest) and not only_state
        dq, dk = (dv, dv) if split or only_state else (buffers.dq(), buffers.dq())
        dgates = buffers.dgates(empty=only_state)
        dW = buffers.state() if wants_dW else buffers.nothing
        dlast = buffers.nothing if dW_end is None else dW_end.contiguous()
        dstates = torch.empty_like(states) if split else states
        dright = buffers.dright() if self.separate and not only_state else states if self.separate else dv
        tensors = (*walked, cu_seqlens, (states, tiles, errors), dy, dlast, (dq, dk, dv, *dgates), dW, dstates, dright)
        walk(tensors, self.T, int(dW_end is not None), int(wants_dW))
        # What is left takes the most memory.
        del walked, tensors

        def gradients(dq: Tensor, dk: Tensor) -> Gradients:
            if self.tail_back is not None:
                self.tail_back.clear((dq, dk, dv, *dgates), cu_seqlens, self.T)
            return dq, dk, dv, *dgates, dW if wants_dW else None

        if not split:
            return lambda: gradients(dq, dk)
        before = (tokens, cu_seqlens if self.packed else None, states, errors, dy)

        def finish() -> Gradients:
            chunks, *keys = rest
            if keys:
                # Only these write dq and dk.
                pairs = buffers.pairs()
                chunks((*before, (dv, dv, dv, *dgates), dstates, dright, pairs), self.sequences, self.T)
                dq, dk = buffers.dq(), buffers.dq()
                both = (*before, (dq, dk, dgates[0]), dstates, dright, pairs, buffers.left_out())
                for launch in keys:
                    launch(both, self.sequences, self.T)
            else:
                dq, dk = buffers.dq(), buffers.dq()
                chunks((*before, (dq, dk, dv, *dgates), dstates, dright, None), self.sequences, self.T)
            return gradients(dq, dk)

        return finish

    def compile_ahead(self, back: bool) -> None:
        """Compile all that the first call will run side by side, with `back` what its backward pass will, too.

        What fails shall fail where it is run.
        """
        if self.compiled_ahead:
            return
        self.compiled_ahead = True
        known = self.device.index is None or self.walks[True].known
        if not known and not torch.cuda.is_current_stream_capturing():
            with torch.cuda.device(self.device):
                side_by_side(lambda: [launch.compile() for launch in self.launches(back)])

    def launches(self, back: bool) -> list[Launch]:
        """Return all that a forward pass launches, and with `back` a backward pass with contiguous dy."""
        passes = (True, False) if self.options.grouped else (True,)
        launches = [self.prepare, *(self.walks[read] for read in passes)]
        launches += [tail.launch for tail in (self.tail, self.tail_back if back else None) if tail is not None]
        if back:
            launches.append(self.fade)
            dy = torch.empty(self.buffers.y.shape, dtype=self.buffers.y.dtype, device="meta")
            for full in passes:
                _, walk, rest = self._back(dy, only_state=not full)
                launches += [walk, *(rest if full else ())]
        return [launch for launch in launches if launch is not None]

    def _launch(
        self, kernel: Any, grid: int, dtypes: Dtypes, strides: tuple[int, ...], options: Options, pace: tuple[int, int]
    ) -> Launch:
        """Return a launch with (warps, stages) as its `pace`. Walks take three integers, launches over chunks two."""
        integers = 2 if kernel in (prepare_chunks, chunk_gradients, key_decay_gradients) else 3
        return Launch(kernel, grid, dtypes, integers, (strides, options), *pace, self.device)

    def _prepare(self, only_faded: bool = False) -> Launch:
        """Return the launch for what the walks need to know about the tokens of each chunk."""
        data, _, _, kept = self.dtypes
        a, e, _ = self.gate_dtypes
        unit, strides = self.layout.in_units()
        # What does not change the tiles does not change their kernel. 16-bit operands leave room for longer tiles.
        options = replace(self._over_chunks(), M=0, write=False, tied=False, unit=unit, only_faded=only_faded)
        if self.per_key:
            options = replace(options, block_D=min(options.block_D, PER_KEY_TILE))
        elif self.variant.precision == HALF and options.map == "none":
            options = replace(options, block_D=min(self.options.block_D, 128))
        warps = self.variant.prepare_warps if isinstance(self.variant, SplitWalk) else 1
        faded = (kept, kept, kept, self.dtypes[2]) if self.per_key else (None,) * 4
        dtypes = (data, data, (a, e), self.bounds_dtype if self.packed else None, kept, faded)
        grid = self.buffers.tiles.shape[0] * self.options.H
        return self._launch(prepare_chunks, grid, dtypes, (*strides[:4], *strides[6:]), options, (warps, 1))

    def _over_chunks(self) -> Options:
        """Return the options of launches over chunks: they do not see groups, and take D in tiles."""
        options, variant = self.options, self.variant
        tile = options.block_D if options.map != "none" else 16
        if isinstance(variant, SplitWalk):
            tile = variant.tile(options.block_D)
        return replace(options, steps=1, packed=self.packed, grouped=False, block_D=tile)

    def _in_walks(self, unit: int, warps: int, stages: int, **more: Any) -> Options:
        """Return the options of a walk."""
        variant = self.variant
        if isinstance(variant, RecurrentWalk):
            more |= {"lanes": variant.lanes, "warps": warps, "stages": stages}
        elif isinstance(variant, ChunkedWalk):
            # Where strides are of no unit, loads are of single entries, which are many: rather transpose on chip.
            more |= {"both_ways": variant.both_ways and unit > 1, "prefetch": variant.prefetch}
        return replace(self.options, unit=unit, **more)

    def _columns(self, whole: bool = False) -> tuple[int, int]:
        """Return how many values a program of a walk takes, and how many programs there are."""
        M, variant = self.options.M, self.variant
        block = power_of_two(M)
        if isinstance(variant, ChunkedWalk) and not whole:
            block = min(variant.columns, block)
        return block, self.columns * -(-M // block)

    def _walked_dtypes(self) -> Dtypes:
        """Return the dtypes of what walks take of tokens: q, k, v and the gates; and what decays per key leave."""
        (data, _, wide, kept), (a, e, w) = self.dtypes, self.gate_dtypes
        if self.per_key:
            return (kept, kept, data, None, e, w), (kept, wide)
        return (data, data, data, a, e, w), (None, None)

    def _walk(self, read: bool) -> Launch:
        """Return the launch of the forward walk."""
        data, out, wide, kept = self.dtypes
        pace = (self.variant.forward_warps, self.variant.forward_stages)
        unit, strides = self.walked.in_units()
        block, programs = self._columns()
        options = self._in_walks(unit, *pace, block_M=block, read=read)
        kernel = _recurrent_kernel(back=False) if isinstance(self.variant, RecurrentWalk) else walk_forward
        dtypes = (*self._walked_dtypes(), wide, self.bounds_dtype, (out if read else data, wide), (kept,) * 3)
        return self._launch(kernel, programs, dtypes, strides, options, pace)

    def _back(self, dy: Tensor, only_state: bool) -> tuple[Tensor, Launch, list[Launch]]:
        """Return dy as kernels can read it, the walk back, and the launches for what that leaves, if any."""
        key = (dy.stride(), dy.dtype, only_state)
        if key not in self.backs:
            if (aligned := addressable(dy, self.layout.reach)) is not dy:
                return self._back(aligned, only_state)
            if len(self.backs) >= MOST_GRADIENTS:
                self.backs.clear()
            self.backs[key] = self._walk_back(dy, only_state), self._rest(dy)
        return dy, *self.backs[key]

    def _walk_back(self, dy: Tensor, only_state: bool) -> Launch:
        """Return the launch of the walk back."""
        data, _, wide, kept = self.dtypes
        pace = (self.variant.backward_warps, self.variant.backward_stages)
        unit, strides = self.walked.in_units(dy)
        fused = not isinstance(self.variant, SplitWalk) and not only_state
        block, programs = self._columns(whole=fused)
        how = {"fused": fused, "only_state": only_state}
        options = self._in_walks(unit, *pace, block_M=block, **how)
        kernel = _recurrent_kernel(back=True) if isinstance(self.variant, RecurrentWalk) else walk_backward
        inputs = (*self._walked_dtypes(), self.bounds_dtype, (kept,) * 3, dy.dtype, wide)
        gradients = ((data, data, data, *self.gate_dtypes), wide, kept, kept if self.separate else data)
        return self._launch(kernel, programs, (*inputs, *gradients), strides, options, pace)

    def _rest(self, dy: Tensor) -> list[Launch]:
        """Return the launches for the gradients of all chunks, where the walk back leaves them."""
        variant = self.variant
        if not isinstance(variant, SplitWalk):
            return []
        data, _, wide, kept = self.dtypes
        unit, strides = self.layout.in_units(dy)
        several = variant.chunks_per_program
        options = replace(
            self._over_chunks(),
            C=variant.chunk,
            unit=unit,
            block_M=power_of_two(self.options.M),
            separate=self.separate,
            planes=self.buffers.pairs.shape[2],
            chunks_per_program=several,
            both_ways=several > 1 and variant.both_ways and unit > 1,
        )
        slots = self.buffers.states.shape[0]
        chunks = slots if self.packed else -(-self.T // variant.chunk)
        programs = -(-chunks // several) * (1 if self.packed else self.sequences)
        bounds = self.bounds_dtype if self.packed else None
        tokens = (data, data, data, *self.gate_dtypes)
        inputs = (tokens, bounds, kept, kept, dy.dtype)
        dright, pairs = kept if self.separate else data, kept if self.per_key else None
        outputs = (tokens, kept, dright, pairs)
        pace = (variant.gradient_warps, variant.gradient_stages)
        launches = [self._launch(chunk_gradients, programs * options.H, (*inputs, *outputs), strides, options, pace)]
        if self.per_key:
            programs = slots * -(-options.D // options.block_D)
            of_keys = ((data, data, wide), kept, dright, pairs, torch.int32)
            for steep, warps in ((False, variant.gradient_warps), (True, STEEP_WARPS)):
                how, dtypes = replace(options, steep=steep), (*inputs, *of_keys)
                launches.append(
                    self._launch(key_decay_gradients, programs * options.H, dtypes, strides, how, (warps, 1))
                )
        return launches


# The dtype of y, whether the gates are tied, the variant and the features.
How = tuple[torch.dtype, bool, Variant, Features]


def plan(tokens: Tokens, N: int, cu_seqlens: Tensor | None, how: How, grouped: bool = False) -> Plan:
    """Return the plan for these shapes, strides and dtypes."""
    q, k, v, a, e, w = tokens
    shapes = (q.shape, q.stride(), k.stride(), v.shape, v.stride(), kind_of(a), kind_of(e), kind_of(w))
    key = (*shapes, N, kind_of(cu_seqlens), q.dtype, q.device, how, grouped)
    return planned(key, lambda: Plan(tokens, N, cu_seqlens, *how, grouped))
