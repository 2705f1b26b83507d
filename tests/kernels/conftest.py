"""One thread, as every engine process has; Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

assert "triton" not in sys.modules, "something imported Triton before its interpreter was chosen"
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` gives a kernel to fill holds NaN, or the largest integer: nothing passes by luck."""
    empty = torch.empty

    def full(*shape: Any, **options: Any) -> torch.Tensor:
        out = empty(*shape, **options)
        return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max)

    monkeypatch.setattr(torch, "empty", full)
