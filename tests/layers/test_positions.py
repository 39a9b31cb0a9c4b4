"""Absolute positions: the sinusoid, and which way they run."""

import math

import pytest
import torch

from fastweights.layers.positions import encode_positions, sinusoid

D = 6


def embedding(n):
    angles = [n / 10000 ** (2 * i / D) for i in range(D // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def stack(*positions):
    return torch.stack([embedding(n) for n in positions])


def test_backward_ends_at_zero_whatever_the_length():
    for T in (1, 7, 63):
        found = encode_positions(torch.zeros(2, T, D, dtype=torch.float64))
        torch.testing.assert_close(found, stack(*range(T - 1, -1, -1)))
        assert torch.equal(found[-1], torch.tensor([0.0, 0, 0, 1, 1, 1], dtype=torch.float64))


def test_forward_goes_on_from_its_start():
    x = torch.zeros(2, 7, D, dtype=torch.float64)
    whole = encode_positions(x, "forward")
    torch.testing.assert_close(whole, stack(*range(7)))
    rest = encode_positions(x[:, :4], "forward", torch.tensor([3, 100]))
    torch.testing.assert_close(rest, torch.stack([whole[3:], stack(100, 101, 102, 103)]))


def test_any_shape_and_16_bits():
    positions = torch.tensor([[1001, 1002], [5, 0]])
    exact = sinusoid(positions, D, torch.float64)
    torch.testing.assert_close(exact.flatten(0, 1), stack(1001, 1002, 5, 0))
    assert torch.equal(sinusoid(positions, D, torch.bfloat16), exact.bfloat16())


def test_backward_has_no_start():
    with pytest.raises(ValueError, match="count them forward to go on from earlier tokens"):
        encode_positions(torch.zeros(1, 2, D), "backward", torch.tensor([3]))
