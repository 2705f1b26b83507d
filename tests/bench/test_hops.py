import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIRED = [
    "hops_p50_ms",
    "floor_p50_ms",
    "hops_ratio",
    "cpu_ms_per_request",
    "cpu_ms_per_request_5ms",
    "cpu_us_per_token",
    "fabric_us_per_token",
    "tokens_per_s",
]


def numbers(value):
    match value:
        case dict():
            return [n for item in value.values() for n in numbers(item)]
        case list():
            return [n for item in value for n in numbers(item)]
        case _:
            return [value]


@pytest.mark.slow
def test_a_quick_run_prints_every_figure_and_leaves_no_process_behind():
    command = [sys.executable, "-m", "bench.hops", "--json", "--quick"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [name for name in REQUIRED if name not in figures] == []
    found = numbers({name: value for name, value in figures.items() if name != "load_average"})
    assert all(isinstance(number, int | float) and number > 0 for number in found), figures
    assert list(figures["causal_sizes_bytes"]) == ["intake", "encoded", "matched", "offer", "tokens", "events"]
    assert figures["hops_ratio"] == pytest.approx(figures["hops_p50_ms"] / figures["floor_p50_ms"], rel=0.01)
