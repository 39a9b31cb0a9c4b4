"""The memory's kernels in Triton's interpreter, which a process chooses when it imports Triton: in one of their own."""

from pathlib import Path

import pytest

from tests.ops.interpreted import outside, rerun

FILES = ("interpret", "calls", "features", "step")


@pytest.mark.slow
@outside
def test_in_the_interpreter():
    pytest.importorskip("triton")
    rerun(*(Path(__file__).with_name(f"test_triton_{name}.py") for name in FILES))
