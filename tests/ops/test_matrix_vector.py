"""The logits of one token in C++, against the product in float64."""

import pytest
import torch

from fastweights.ops.cpu import build
from fastweights.ops.cpu.matrix_vector import matrix_vector, takes
from fastweights.ops.losses.adaptive_softmax import logits_of

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (515, 37), (1100, 128), (8, 16)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)], ids=str
)
def test_agrees_with_float64(rows, size, dtype, tolerance):
    """Also for rows of a larger matrix; 16-bit numbers are multiplied and summed in float32."""
    torch.manual_seed(0)
    weight, bias = torch.randn(rows, size + 3, dtype=dtype)[:, 1:-2], torch.randn(rows, dtype=dtype)
    hidden = torch.randn(1, 1, size, dtype=dtype)
    want = hidden.double() @ weight.double().mT + bias.double()
    found = logits_of(hidden, weight, bias)
    assert takes(hidden, weight, bias) and found.dtype == torch.promote_types(dtype, torch.float32)
    assert found.shape == want.shape and (found - want).norm() < tolerance * want.norm()


def test_what_it_leaves_to_pytorch():
    hidden, weight, bias = torch.randn(2, 8), torch.randn(5, 8), torch.randn(5)
    assert not takes(hidden, weight, bias)
    assert not takes(hidden[:1].clone().requires_grad_(), weight, bias)
    assert not takes(hidden[:1], torch.randn(8, 5).T, bias)


def test_the_number_of_threads_changes_no_bit():
    hidden, weight, bias = torch.randn(70), torch.randn(3000, 70), torch.randn(3000)
    results = []
    for threads in (1, 2, 4, 7):
        torch.set_num_threads(threads)
        results.append(matrix_vector(hidden, weight, bias))
    assert all(torch.equal(results[0], other) for other in results[1:])
