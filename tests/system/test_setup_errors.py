"""A broker that cannot carry the pipeline is found at the start of a worker, with a message that says what to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
import pytest

from tests.system.fleet import GIVE_UP_S, ROOT, STAGES
from tests.tidemill.process import wait_until
from tidemill.errors import ConfigError
from tidemill.nats_server import EmbeddedNats
from tidemill.nats_setup import server_binary


def run_worker(stage: str, url: str, *more: str) -> tuple[int, str]:
    """A worker that should fail to start: its exit code and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", "worker", stage, "--nats", url, "--engine", "stub", *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@contextmanager
def plain_server(folder: Path, config: str) -> Iterator[str]:
    """A nats-server with a configuration that tidemill would never write."""
    (folder / "server.conf").write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"\n{config}')
    process = subprocess.Popen(
        [str(server_binary()), "--config", str(folder / "server.conf")], stderr=subprocess.DEVNULL
    )

    def ports() -> list[str]:
        return [path.read_text() for path in folder.glob("*.ports") if path.read_text().endswith("}")]

    try:
        wait_until(lambda: bool(ports()), "the server does not start")
        yield ports()[0].split('"nats://')[1].split('"')[0].join(("nats://", ""))
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stage", STAGES)
def test_a_broker_without_jetstream_is_named(tmp_path: Path, stage: str):
    with plain_server(tmp_path, "") as url:
        code, said = run_worker(stage, url)
    assert code == ConfigError.exit_code
    assert "JetStream" in said
    assert "Traceback" not in said


def test_a_broker_that_takes_only_small_messages_is_named_with_both_sizes():
    with EmbeddedNats(settings={"max_payload": "64KB"}) as server:
        code, said = run_worker("codec", server.url)
    assert code == ConfigError.exit_code
    assert "65536" in said
    assert "max_payload" in said
    assert "Traceback" not in said


USER = """
jetstream {{ store_dir: "{folder}/store", max_file_store: 16GB }}
authorization {{ users = [ {{ user: mill, password: water, permissions: {permissions} }} ] }}
"""
EVERYTHING = '{ publish: ">", subscribe: ">" }'


@pytest.mark.parametrize(
    ("stage", "permissions", "subject"),
    [
        ("codec", '{ publish: { allow: ">", deny: "$JS.API.>" }, subscribe: ">" }', "$JS.API"),
        ("codec", '{ publish: ">", subscribe: { allow: ">", deny: "v1.cancel.*" } }', "v1.cancel"),
        ("lookup", '{ publish: ">", subscribe: { allow: ">", deny: "v1.lookup" } }', "v1.lookup"),
        ("decode", '{ publish: { allow: ">", deny: "v1.beacon.>" }, subscribe: ">" }', "v1.beacon"),
    ],
)
def test_a_user_without_a_permission_is_told_which(tmp_path: Path, stage: str, permissions: str, subject: str):
    with plain_server(tmp_path, USER.format(folder=tmp_path, permissions=permissions)) as url:
        code, said = run_worker(stage, url.replace("//", "//mill:water@"))
    assert code == ConfigError.exit_code
    assert subject in said
    assert "Traceback" not in said


def test_a_wrong_password_is_an_error_of_the_set_up(tmp_path: Path):
    with plain_server(tmp_path, USER.format(folder=tmp_path, permissions=EVERYTHING)) as url:
        code, said = run_worker("lookup", url.replace("//", "//mill:fire@"))
    assert code == ConfigError.exit_code
    assert "fire" not in said
    assert "Traceback" not in said


def test_no_broker_at_all_is_named_with_its_address():
    code, said = run_worker("lookup", "nats://127.0.0.1:1")
    assert code == ConfigError.exit_code
    assert "127.0.0.1:1" in said
    assert "Traceback" not in said


def test_a_stream_of_another_kind_under_our_name_is_named(tmp_path: Path, nats_url: str):

    async def occupy() -> None:
        connection = await nats.connect(nats_url)
        await connection.jetstream().add_stream(name="INTAKE", subjects=["v1.in.interactive.*"])
        await connection.close()

    asyncio.run(occupy())
    code, said = run_worker("codec", nats_url)
    assert code == ConfigError.exit_code
    assert "INTAKE" in said
    assert "differs" in said
    assert "Traceback" not in said
