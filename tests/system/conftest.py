"""Sets of real processes. Each test starts only what it needs; what a module shares, it starts once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.fleet import Fleet


@pytest.fixture(scope="module")
def new_fleet(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An empty fleet on the module's broker."""
    fleet = Fleet(nats_url, tmp_path_factory.mktemp("logs"))
    yield fleet
    fleet.stop()


@pytest.fixture(scope="module")
def fleet(new_fleet: Fleet) -> Fleet:
    """One worker of each kind with the stub engine, `codec-0` and so on, ready."""
    new_fleet.start_all()
    asyncio.run(new_fleet.ready())
    return new_fleet


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[[str], Fleet]]:
    """Fleets of one test's own, for a broker of its own."""
    fleets: list[Fleet] = []

    def make(url: str) -> Fleet:
        log_dir = tmp_path / f"logs-{len(fleets)}"
        log_dir.mkdir()
        fleets.append(Fleet(url, log_dir))
        return fleets[-1]

    yield make
    for fleet in reversed(fleets):
        fleet.stop()
