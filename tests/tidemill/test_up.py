"""`tidemill up` as a process, with a small program in the place of its workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tidemill.process import ended, wait_until
from tidemill.nats_setup import NatsSetup
from tidemill.up import UpOptions, worker_specs

ROOT = Path(__file__).parents[2]

WORKER = """
import json, os, signal, sys, threading, time
from pathlib import Path
folder = Path(os.environ["TEST_FOLDER"])
name = sys.argv[sys.argv.index("--id") + 1]
(folder / (name + ".json")).write_text(json.dumps({"argv": sys.argv[1:], "pid": os.getpid()}))
def drain(*_):
    with (folder / "ends").open("a") as ends:
        ends.write(name + "\\n")
    time.sleep(float(os.environ.get("TEST_DRAIN_S", "0")))
    sys.exit()
signal.signal(signal.SIGTERM, drain)
def beat():
    while True:
        os.write(int(os.environ["TIDEMILL_HEARTBEAT_FD"]), b".")
        time.sleep(1)
threading.Thread(target=beat, daemon=True).start()
time.sleep(600)
"""

UP = """
import asyncio, sys
from pathlib import Path
from tidemill.up import UpOptions, serve
program = (sys.executable, sys.argv[2])
options = UpOptions(engine="stub", counts={"decode": 2}, log_dir=Path(sys.argv[1]), program=program)
say = lambda line: print(line, flush=True)
asyncio.run(serve(options, say=say, report=lambda line: print(line, file=sys.stderr, flush=True)))
"""
NAMES = ["codec-0", "decode-0", "decode-1", "lookup-0", "prefill-0"]


class Up:
    """A running `tidemill up` and what its workers left in `folder`."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.process = process
        assert process.stdout is not None
        self.line = process.stdout.readline()

    def workers(self) -> dict[str, dict[str, object]]:
        return {path.stem: json.loads(path.read_text()) for path in self.folder.glob("*-?.json")}

    def pids(self) -> list[int]:
        return [int(str(worker["pid"])) for worker in self.workers().values()]

    def port(self) -> int:
        return int(self.line.split("127.0.0.1:")[1].split()[0])


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    started: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> Up:
        own = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path), "TEST_FOLDER": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-c", UP, str(tmp_path / "logs"), str(program)],
            cwd=ROOT,
            env={**os.environ, **own, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return Up(tmp_path, process)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_one_line_says_where_it_serves_when_all_workers_do(start: Callable[..., Up]):
    up = start()
    assert up.line == (f'tidemill serves at nats://127.0.0.1:{up.port()} (stub engine); try: tidemill send "Hello"\n')
    assert sorted(up.workers()) == NAMES
    assert answers(up.port())
    assert json.loads((up.folder / "tidemill" / "up.json").read_text())["nats"] == [f"nats://127.0.0.1:{up.port()}"]


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_owners_then_engines_then_the_broker_and_leaves_nothing(
    start: Callable[..., Up], sig: signal.Signals
):
    up = start(TEST_DRAIN_S="0.1")
    pids = up.pids()
    os.killpg(up.process.pid, sig)  # to the whole group, as a terminal does
    assert up.process.wait(30) == 0
    ends = (up.folder / "ends").read_text().split()
    assert ends[0] == "codec-0"
    assert sorted(ends) == NAMES
    assert all(ended(pid) for pid in pids)
    assert not answers(up.port())
    assert not (up.folder / "tidemill" / "up.json").exists()
    assert not list(up.folder.glob("tidemill-nats-*"))


def test_a_second_signal_does_not_wait(start: Callable[..., Up]):
    up = start(TEST_DRAIN_S="600")
    up.process.send_signal(signal.SIGINT)
    wait_until((up.folder / "ends").exists, "no worker was asked to stop")
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(30) == 0


def test_a_killed_broker_comes_back_where_it_was(start: Callable[..., Up]):
    up = start()
    [ports] = up.folder.glob("tidemill-nats-*/*.ports")
    broker = int(ports.stem.partition("_")[2])
    os.kill(broker, signal.SIGKILL)
    wait_until(lambda: ended(broker) and answers(up.port()), "the broker was not started again")
    assert len(up.workers()) == len(NAMES)


def test_kill_9_leaves_no_worker_and_no_broker(start: Callable[..., Up]):
    up = start()
    pids = up.pids()
    up.process.kill()
    wait_until(lambda: all(ended(pid) for pid in pids), "a worker outlived `tidemill up`")
    wait_until(lambda: not answers(up.port()), "nats-server outlived `tidemill up`")


def test_a_store_in_use_ends_it_with_a_message(tmp_path: Path):
    setup = NatsSetup(store_dir=tmp_path / "store")
    ended_up = subprocess.run(
        [sys.executable, "-m", "tidemill", "up", "--store-dir", str(setup.store_dir), "--log-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    setup.close()
    assert ended_up.returncode == 1
    assert ended_up.stderr == f"tidemill: store directory {setup.store_dir} is in use by another tidemill\n"


def test_workers_are_started_with_all_they_need_to_know():
    options = UpOptions(engine="torch", counts={"lookup": 0, "prefill": 2}, options={"step_ms": "5"})
    specs = {spec.name: spec for spec in worker_specs(options, ("nats://a:1", "nats://b:2"))}
    assert list(specs) == ["decode-0", "prefill-0", "prefill-1", "codec-0"]
    assert specs["codec-0"].argv == (
        *(sys.executable, "-m", "tidemill", "worker", "codec", "parse", "--nats", "nats://a:1,nats://b:2"),
        *("--engine", "torch", "--id", "codec-0", "--log-level", "info", "--option", "step_ms=5"),
    )
    assert specs["codec-0"].tier > specs["decode-0"].tier
