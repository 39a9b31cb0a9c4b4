"""How to take one token: what follows from shapes, strides and dtypes is worked out once, in a `StepPlan`."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from fastweights.ops.features import Features
from fastweights.ops.gpu.launcher import Launch, dtype_of, kind_of, planned
from fastweights.ops.gpu.memory.buffers import Buffer
from fastweights.ops.gpu.memory.kernels.one_token import take_step
from fastweights.ops.gpu.memory.kernels.options import TYPES, Options, map_options
from fastweights.ops.gpu.memory.strides import Gates, common_strides, per_key


class StepPlan:
    """The kernel for one token of each sequence, for all calls that share shapes, strides and dtypes."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, tied: bool, normalized: bool, features: Features
    ) -> None:
        (B, _, H, R), M, data, device = q.shape, v.shape[3], q.dtype, q.device
        D, wide = features.size(R), torch.promote_types(data, torch.float32)
        block_D = next_power_of_2(D)
        block_M = min(next_power_of_2(M), max(4096 // block_D, 16))
        heads, (ready, gate_strides) = _with_adjacent_features(q, k, v), _gates_of_one_token(gates)
        self.as_given = all(x is y for x, y in zip((*heads, *ready), (q, k, v, *gates), strict=True))
        strides = (*(s for x in heads for s in (x.stride(0), x.stride(2))), *gate_strides)
        a, e, w = (dtype_of(gate) for gate in ready)
        options = Options(
            **map_options(features, R),
            H=H,
            M=M,
            block_D=block_D,
            block_M=block_M,
            decay=a is not None and not per_key(gates[0]),
            per_key=per_key(gates[0]),
            erase=e is not None,
            write=w is not None,
            tied=tied,
            normalized=normalized,
            acc=TYPES[wide],
        )
        z = wide if normalized else None
        dtypes = (data, data, data, (a, e, w), wide, z, data, wide, z)
        programs, warps = B * H * -(-M // block_M), max(1, min(8, block_D * block_M // 1024))
        self.launch = Launch(take_step, programs, dtypes, 1, (strides, options), warps, 1, device)
        self.index, self.y, self.W = (
            device.index,
            Buffer(tuple(v.shape), data, device),
            Buffer((B, H, D, M), wide, device),
        )
        self.z = Buffer((B, H, D), wide, device) if normalized else None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, W: Tensor | None, z: Tensor | None, in_place: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return y (B, 1, H, M), W and z after one token; they are zeros before it where they are None.

        With `in_place` W may be overwritten.
        """
        if self.index is not None and self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self(q, k, v, gates, W, z, in_place)
        if not self.as_given:
            (q, k, v), gates = _with_adjacent_features(q, k, v), _gates_of_one_token(gates)[0]
        y = self.y()
        # Every program reads z, and only one writes it: the new one needs a place of its own.
        z_end = None if self.z is None else self.z()
        if W is None:
            W_end = self.W()
            self.launch((q, k, v, gates, W_end, z_end, y, W_end, z_end), 0)
        else:
            W = W.contiguous()
            W_end = W if in_place else self.W()
            # After a segment with attention normalisation it is a column of a larger state.
            z = None if z is None else z.contiguous()
            self.launch((q, k, v, gates, W, z, y, W_end, z_end), 1)
        return y, W_end, z_end


def _with_adjacent_features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    return q, k, v


def _gates_of_one_token(gates: Gates) -> tuple[Gates, tuple[int, int]]:
    """Return the gates as the kernel takes them, and the batch and head strides of those that are one a head."""
    a, e, w = gates
    if not per_key(a):
        return common_strides(gates, 0)
    assert a is not None
    (_, e, w), strides = common_strides((None, e, w), 0)
    return (a.contiguous(), e, w), strides


def step_plan(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, tied: bool, normalized: bool, features: Features
) -> StepPlan:
    """Return the plan for these shapes, strides and dtypes."""
    a, e, w = gates
    shapes = (q.shape, q.stride(), k.stride(), v.shape, v.stride(), kind_of(a), kind_of(e), kind_of(w))
    key = (*shapes, q.dtype, q.device, tied, normalized, features)
    return planned(key, lambda: StepPlan(q, k, v, gates, tied, normalized, features))
