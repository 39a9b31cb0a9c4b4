# mypy: disable-error-code="no-untyped-def"
"""Gluon as the walks token by token use it: the part of Triton in which layouts and copies are chosen by hand."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere

if triton.knobs.runtime.interpret:
    # Tests put a stand-in in the place of this module before they get here.
    raise RuntimeError(
        "Triton's interpreter (TRITON_INTERPRET=1) cannot run walks token by token, which are written in Gluon; "
        "choose another backend"
    )

jit, constexpr_function = gluon.jit, gluon.constexpr_function
async_copy, mma_v2 = ampere.async_copy, ampere.mma_v2


@triton.jit
def _add_two(a, b, c, d):
    return a + c, b + d


@jit
def two_sums(a, b):
    """Sums over the second axis, side by side: one alone would wait for each of its additions."""
    a, b = gl.reduce((a, b), 1, _add_two)
    return a[:, None], b[:, None]


__all__ = ["async_copy", "constexpr_function", "gl", "jit", "mma_v2", "two_sums"]
