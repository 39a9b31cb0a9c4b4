"""Updates captured as CUDA graphs: the host launches them one by one at first, and afterwards as a whole.

A graph repeats the same kernels on the same memory. So batch and carried state are copied to where the capture found
them; numbers that differ from update to update, such as the learning rate and the state of the random generator, are
on the device or known to the graph.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fastweights.common.cuda_graph import capture
from fastweights.common.tree import map_tensors, signature, tensors_of

# Updates of one shape before it is captured: libraries prepare themselves, the compiler compiles, kernels are checked.
WARMUP_UPDATES = 3
# Shapes that are captured; updates of others run as they come. A graph of some thousand kernels takes a few megabytes.
MAX_CAPTURES = 128
# Updates after which a shape should have come again.
PATIENCE = 100

# What an update does: from the batches and the carried state to the next, with or without the compiled loss.
Update = Callable[[Any, Any, bool], Any]


def refusal(device: torch.device, world: int, groups: Iterable[dict[str, Any]]) -> str | None:
    """Say why updates cannot be captured; None where they can."""
    if device.type != "cuda":
        return f"a CUDA graph needs a CUDA device, and this is {device}"
    if world > 1:
        return f"an update of {world} processes cannot be captured"
    if not all(group.get("capturable") for group in groups):
        return "the optimiser is not capturable"
    return None


class _Inputs(NamedTuple):
    """Batches and carried state of one shape, where the graph has them."""

    batches: Any
    carry: Any
    tensors: list[Tensor]

    @classmethod
    def like(cls, batches: Any, carry: Any) -> Self:
        batches, carry = map_tensors(torch.clone, (batches, carry))
        return cls(batches, carry, tensors_of((batches, carry)))

    def fill(self, batches: Any, carry: Any) -> None:
        torch._foreach_copy_(self.tensors, tensors_of((batches, carry)))


class CapturedUpdates:
    """Runs updates, and captures those of a shape that comes twice in a row, such as all segments of full length.

    The first of a shape runs uncompiled, as the odd segment at the end of an epoch does each time: compiling for it
    would take longer than the epoch. Those that lead up to a capture are updates like all others. With `many_shapes`
    the code is compiled once for all of them, and a shape need not come twice in a row.
    """

    def __init__(self, update: Update, device: torch.device, many_shapes: bool = False) -> None:
        self.update, self.many_shapes = update, many_shapes
        self._inputs: dict[Any, _Inputs] = {}
        self._replays: dict[Any, Callable[[], Any]] = {}
        self._warmups: dict[Any, int] = {}
        self._last: Any = None
        self._count = 0
        cuda = device.type == "cuda"
        # Graphs that never run side by side may share their memory.
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        self._side = torch.cuda.Stream(device) if cuda else None

    def __call__(self, batches: Any, carry: Any) -> tuple[Any, Any]:
        """Make one update; return the carried state as it was before, and as it is now."""
        shape = signature((batches, carry))
        if shape not in self._replays:
            repeated = shape in self._warmups if self.many_shapes else shape == self._last
            self._warmups.setdefault(shape, 0)
            self._last = shape
            self._check_progress(repeated)
            if not repeated or len(self._replays) == MAX_CAPTURES:
                return carry, self._run_on_side_stream(batches, carry, compiled=False)
            self._warmups[shape] += 1
            if shape not in self._inputs:
                self._inputs[shape] = _Inputs.like(batches, carry)
            inputs = self._inputs[shape]
            if self._warmups[shape] <= WARMUP_UPDATES:
                # On the very inputs of the capture: were they laid out otherwise, it would have to be compiled anew.
                inputs.fill(batches, carry)
                return carry, self._run_on_side_stream(inputs.batches, inputs.carry, compiled=True)
            self._replays[shape] = capture(partial(self.update, inputs.batches, inputs.carry, True), self._pool)
        self._last = shape
        self._inputs[shape].fill(batches, carry)
        return self._inputs[shape].carry, self._replays[shape]()

    def _run_on_side_stream(self, batches: Any, carry: Any, compiled: bool) -> Any:
        """Make an update on another stream than the usual one, as a capture does: autograd remembers the first."""
        if self._side is None:
            return self.update(batches, carry, compiled)
        here = torch.cuda.current_stream()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            result = self.update(batches, carry, compiled)
        here.wait_stream(self._side)
        return result

    def _check_progress(self, repeated: bool) -> None:
        """Refuse batches whose shapes change with every update, so that none could ever be captured."""
        self._count += 1
        if self._count > PATIENCE and not self._replays and not repeated and not any(self._warmups.values()):
            raise ValueError(
                f"of {PATIENCE} updates no two{'' if self.many_shapes else ' in a row'} had batches of one shape; a "
                "graph can be made of none of them: train without graph"
            )
