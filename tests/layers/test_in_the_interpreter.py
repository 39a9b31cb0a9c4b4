"""The kernels of layers and of linear attention in Triton's interpreter: one process, which chooses it at import."""

from pathlib import Path

import pytest

from tests.ops.interpreted import outside, rerun

FILES = ("test_adaptive_fused.py", "test_feedforward_fused.py", "test_smoothed.py", "test_derivatives.py")
FILES += ("test_fused_kernels.py",)
LINEAR_ATTENTION = "test_linear_attention_fused.py"


@pytest.mark.slow
@outside
def test_in_the_interpreter():
    pytest.importorskip("triton")
    rerun(*(Path(__file__).with_name(name) for name in FILES), Path(__file__).parents[1] / "ops" / LINEAR_ATTENTION)
