"""Backend `reference`: the loop of `ops.reference`."""

from fastweights.ops import reference
from fastweights.ops.backend import Backend

BACKEND = Backend(
    name="reference",
    description="the paper's equations as a loop over time: every rule, any device, differentiable twice",
    run=reference.run,
    refuses=lambda problem: None,
)
