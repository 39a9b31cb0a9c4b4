"""Backend `chunked`: the family's recurrence by `ops.chunked`."""

from functools import partial

from fastweights.ops import chunked, family
from fastweights.ops.spec import Backend, Executable, Refusal, Spec, expanding_first, mapping_first


def prepare(spec: Spec) -> Executable | Refusal:
    """Answer with the chunked recurrence for every rule of the family."""
    if reason := family.outside(spec.rule):
        return Refusal(reason)
    log = family.in_logarithms(spec)
    return family.executable(spec, partial(chunked.recurrence, eager=spec.eager, log=log), logs=log)


BACKEND = Backend(
    name="chunked",
    description="matrix products in chunks of time, plain PyTorch: linear rules, any device, O(T/C) states kept",
    prepare=mapping_first(expanding_first(prepare)),
    single_tokens=lambda spec: False,
)
