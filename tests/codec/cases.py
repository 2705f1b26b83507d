"""The case table tests/data/codec_cases.jsonl: an input and what a correct codec makes of it, one a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[1] / "data/codec_cases.jsonl"


def cases(*areas: str) -> list[Any]:
    """pytest parameters (input, expectation) of the cases of these areas."""
    found = [json.loads(line) for line in _FILE.read_text().strip().split("\n")]  # texts hold other line ends
    return [pytest.param(case["input"], case["expect"], id=case["id"]) for case in found if case["area"] in areas]
