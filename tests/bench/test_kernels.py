import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.kernels import CASES, GPU_GONE, Place, difference

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_without_a_gpu_it_says_so_in_one_line(options):
    command = [sys.executable, "-m", "bench.kernels", *options]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == GPU_GONE
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no GPU was found" in done.stderr


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_made_again_and_again_and_counts_its_bytes(name):
    case = CASES[name]
    first, second = case.make(case.small, Place("cpu")), case.make(case.small, Place("cpu"))
    assert difference(first.run(), second.run()) == 0
    assert first.num_bytes > 0


def test_the_difference_is_the_largest_one_or_the_share_of_other_numbers():
    values = torch.tensor([1.0, 2.0]), torch.tensor([1, 2, 3, 4])
    assert difference(values, (torch.tensor([1.0, 2.5]), torch.tensor([1, 2, 3, 4]))) == 0.5
    assert difference(values, (torch.tensor([1.0, 2.0]), torch.tensor([1, 2, 3, 5]))) == 0.25
    assert difference(torch.tensor([float("nan")]), torch.tensor([0.0])) > 1e30
