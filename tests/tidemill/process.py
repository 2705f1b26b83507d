"""What the process tests share: is it gone, and wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

GIVE_UP_S = 30.0  # far above what any of it takes; reached only when a test fails


def ended(pid: int) -> bool:
    """No process of that id, or only its zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    """Return when the condition holds, fail with `otherwise` when it never does."""
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(otherwise)
        time.sleep(0.01)
