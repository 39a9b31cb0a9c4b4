"""Updates recorded as CUDA graphs: the host says once what is to be done, and afterwards only that it is to be done.

A graph repeats the same kernels on the same memory. So batch and carried state are copied to where the recording found
them; numbers that differ from update to update, such as the learning rate and the state of the random generator, are
on the device or known to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.common.tree import map_tensors, signature, tensors_of

# Updates of one kind before it is recorded: libraries prepare themselves, the compiler compiles, kernels are checked.
REHEARSALS = 3
# Kinds that are recorded; more of them run as they come.
MOST = 16
# Updates after which two of a kind should have come in a row.
PATIENCE = 100

# What an update does: from the batches and the carried state to the next, with or without the compiled loss.
Update = Callable[[Any, Any, bool], Any]


def refusal(device: torch.device, world: int, groups: Iterable[dict[str, Any]]) -> str | None:
    """Why updates cannot be recorded."""
    if device.type != "cuda":
        return f"a CUDA graph needs a CUDA device, and this is {device}"
    if world > 1:
        return f"an update of {world} processes cannot be recorded"
    if not all(group.get("capturable") for group in groups):
        return "the optimiser is not capturable"
    return None


def capture(work: Callable[[], Any], pool: Any) -> Callable[[], Any]:
    """Record `work`; the function that comes back repeats it, and returns what it returned, in the same memory."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = work()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"the update cannot be recorded as a CUDA graph: {reason}; train without graph") from error

    def replay() -> Any:
        graph.replay()
        return result

    return replay


class _Inputs(NamedTuple):
    """Batches and carried state of one kind, where the recording has them."""

    batches: Any
    carry: Any
    places: list[Tensor]

    @classmethod
    def like(cls, batches: Any, carry: Any) -> _Inputs:
        batches, carry = map_tensors(torch.clone, (batches, carry))
        return cls(batches, carry, tensors_of((batches, carry)))

    def fill(self, batches: Any, carry: Any) -> None:
        torch._foreach_copy_(self.places, tensors_of((batches, carry)))


class Recorder:
    """Runs updates, and records those of a kind that comes twice in a row, such as all segments of full length.

    The first of a kind runs uncompiled, as the odd segment at the end of an epoch does each time: compiling for it
    would take longer than the epoch. Those that lead up to a recording are updates like all others.
    """

    def __init__(self, update: Update, device: torch.device) -> None:
        self.update = update
        self._inputs: dict[Any, _Inputs] = {}
        self._recordings: dict[Any, Callable[[], Any]] = {}
        self._rehearsed: dict[Any, int] = {}
        self._last: Any = None
        self._count = 0
        cuda = device.type == "cuda"
        # Graphs that never run side by side may share their memory.
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        self._side = torch.cuda.Stream(device) if cuda else None

    def __call__(self, batches: Any, carry: Any) -> tuple[Any, Any]:
        """One update: the carried state as it was before, and as it is now."""
        kind = signature((batches, carry))
        if kind not in self._recordings:
            again, self._last = kind == self._last, kind
            self._be_patient(again)
            if not again or len(self._recordings) == MOST:
                return carry, self._beside(batches, carry, compiled=False)
            self._rehearsed[kind] = self._rehearsed.get(kind, 0) + 1
            if kind not in self._inputs:
                self._inputs[kind] = _Inputs.like(batches, carry)
            inputs = self._inputs[kind]
            if self._rehearsed[kind] <= REHEARSALS:
                # On the very inputs of the recording: were they laid out otherwise, it would have to be compiled anew.
                inputs.fill(batches, carry)
                return carry, self._beside(inputs.batches, inputs.carry, compiled=True)
            work = partial(self.update, inputs.batches, inputs.carry, True)
            self._recordings[kind] = capture(work, self._pool)
        self._last = kind
        self._inputs[kind].fill(batches, carry)
        return self._inputs[kind].carry, self._recordings[kind]()

    def _beside(self, batches: Any, carry: Any, compiled: bool) -> Any:
        """An update on another stream than the usual one, as recording has it: autograd remembers the first it saw."""
        if self._side is None:
            return self.update(batches, carry, compiled)
        here = torch.cuda.current_stream()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            result = self.update(batches, carry, compiled)
        here.wait_stream(self._side)
        return result

    def _be_patient(self, again: bool) -> None:
        self._count += 1
        if self._count > PATIENCE and not self._recordings and not again and not self._rehearsed:
            raise ValueError(
                f"of {PATIENCE} updates no two in a row had batches of one shape; a graph can be made of none of them: "
                "train without graph"
            )
