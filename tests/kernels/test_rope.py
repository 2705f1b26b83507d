from __future__ import annotations

import math

import pytest
import torch

from kernels.rope import Yarn, rope_frequencies, rope_table, rotate

YARN = Yarn(factor=16, beta_fast=32, beta_slow=1, original_positions=65536)


def test_pairs_turn_by_position_times_frequency():
    frequencies = rope_frequencies(8, 10000.0)
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(16))
    y = rotate(x.clone(), rope_table(frequencies, 40)[[0, 1, 7, 20, 39]])
    assert torch.equal(y[..., :8], x[..., :8])
    turn = torch.polar(torch.ones(5, 4), torch.outer(torch.tensor([0.0, 1, 7, 20, 39]), frequencies))
    pairs = torch.view_as_complex(x[..., 8:].reshape(5, 3, 4, 2)) * turn[:, None]
    assert torch.allclose(torch.view_as_real(pairs).flatten(-2), y[..., 8:], atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 16), (6, 2, 16)])
def test_the_inverse_turns_back(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(17))
    table = rope_table(rope_frequencies(16, 160000.0, YARN), 6)
    assert torch.allclose(rotate(rotate(x.clone(), table), table, inverse=True), x, atol=1e-5)


def test_yarn_leaves_fast_pairs_alone_and_slows_the_slow_ones():
    """The released configuration: facts-model 3.1."""
    plain, scaled = rope_frequencies(64, 160000.0), rope_frequencies(64, 160000.0, YARN)
    ratio = (plain / scaled).tolist()
    low = math.floor(64 * math.log(65536 / (32 * 2 * math.pi)) / (2 * math.log(160000)))
    high = math.ceil(64 * math.log(65536 / (2 * math.pi)) / (2 * math.log(160000)))
    assert ratio[: low + 1] == pytest.approx([1.0] * (low + 1))
    assert ratio[high:] == pytest.approx([16.0] * (32 - high))
    assert ratio == sorted(ratio)
