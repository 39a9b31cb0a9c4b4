"""Look into a fast-weight memory and edit it: plain functions on states, keys and values.

Shapes are those of `fast_weight_memory`: keys and queries (B, T, H, D) after their feature map, values (B, T, H, M),
and a state with W (B, H, D, M). What compares every read with every write has the shape (B, H, reads, writes).

| question | function |
|---|---|
| what does the memory answer for a key, and how well? | `recall` |
| from which writes does a read come? | `attribute` |
| how much do keys disturb each other? | `interference` |
| what is still readable, and how old is it? | `retention` |
| how is W filled over time? | `spectra`, `spectrum`, `effective_rank`, `states` |
| how many associations fit? | `capacity`, `plot_capacity` |
| change one association and no other | `forget`, `overwrite` |
| what does a layer hand to its memory? | `inputs_of` |
"""

from fastweights.probe.capacity import Capacity, capacity, plot_capacity
from fastweights.probe.edit import forget, overwrite
from fastweights.probe.reading import Recall, inputs_of, recall
from fastweights.probe.time import Retention, Spectra, effective_rank, retention, spectra, spectrum, states
from fastweights.probe.writes import Attribution, attribute, interference

__all__ = [
    "Attribution",
    "Capacity",
    "Recall",
    "Retention",
    "Spectra",
    "attribute",
    "capacity",
    "effective_rank",
    "forget",
    "inputs_of",
    "interference",
    "overwrite",
    "plot_capacity",
    "recall",
    "retention",
    "spectra",
    "spectrum",
    "states",
]
