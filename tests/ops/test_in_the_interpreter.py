"""The memory's kernels in Triton's interpreter, which a process chooses when it imports Triton: two processes."""

from pathlib import Path

import pytest

from tests.ops.interpreted import outside, rerun

FILES = {"walks": ("interpret", "calls"), "maps": ("features", "step")}


@pytest.mark.slow
@outside
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_in_the_interpreter(files):
    pytest.importorskip("triton")
    rerun(*(Path(__file__).with_name(f"test_triton_{name}.py") for name in files))
