"""Backend `reference`: the loop of `ops.reference`."""

from fastweights.ops import reference
from fastweights.ops.spec import Backend, expanding_first, mapping_first

BACKEND = Backend(
    name="reference",
    description="the paper's equations as a loop over time: every rule, any device, differentiable any number of times",
    prepare=mapping_first(expanding_first(lambda spec: reference.run)),
)
