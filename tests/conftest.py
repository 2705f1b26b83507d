"""Fixtures that every package's tests may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidemill.nats_server import EmbeddedNats


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    """The URL of a real nats-server with JetStream, one per test module: no module sees another's streams."""
    with EmbeddedNats() as server:
        yield server.url
