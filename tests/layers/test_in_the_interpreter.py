"""The layers' kernels in Triton's interpreter: one process for all, since it is chosen when Triton is imported."""

from pathlib import Path

import pytest

from tests.ops.interpreted import outside, rerun

FILES = ("test_adaptive_fused.py", "test_feedforward_fused.py", "test_smoothed.py", "test_derivatives.py")
FILES += ("test_fused_kernels.py",)


@pytest.mark.slow
@outside
def test_in_the_interpreter():
    pytest.importorskip("triton")
    rerun(*(Path(__file__).with_name(name) for name in FILES))
