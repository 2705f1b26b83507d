"""The life of a worker: beacons, pings, services in order; and, as a process of its own, its end by signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import SetupError
from pipeline.events import Beacon
from pipeline.membership import Membership
from pipeline.metrics import count
from pipeline.stage import EngineLoad
from pipeline.worker import Worker
from tests.pipeline.fabric import GIVE_UP_S, TOPOLOGY, eventually, joined, limited, new_worker
from tidemill.nats_server import EmbeddedNats
from tidemill.parent_death import die_with_parent

ROOT = Path(__file__).parents[2]
QUICK = limited(beacon_s=0.005, beacon_fresh_s=3600.0)
LOAD = EngineLoad(
    free_slots=3, running=1, queued=2, queued_tokens=77, kv_used=0.5, model="m", fingerprint="f", layout="l",
    max_prompt_tokens=99,
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


def no_beacons() -> list[Beacon]:
    return []


async def until_stop(stop: asyncio.Event) -> None:
    await stop.wait()


async def test_a_worker_makes_sure_of_its_streams_and_announces_itself_until_it_stops(server: EmbeddedNats):
    worker = await Worker.join([server.url], new_worker(), ["codec", "parse"], QUICK)
    worker.add(until_stop)
    async with joined(server.url, topology=QUICK) as bus:
        assert "error" not in await bus.ask_json("$JS.API.STREAM.INFO.INTAKE", {})
        membership, beats = Membership(bus), no_beacons()
        membership.on_change.append(beats.append)
        await bus.flush()
        running = asyncio.ensure_future(worker.run())
        await eventually(lambda: len(beats) >= 12)
        beat: Beacon = beats[-1]
        assert (beat.worker, beat.epoch, beat.roles) == (worker.bus.worker, worker.epoch, ("codec", "parse"))
        assert not beat.draining
        assert [b.worker for b in membership.fresh("parse")] == [worker.bus.worker]
        worker.stop.set()
        await asyncio.wait_for(running, GIVE_UP_S)
        assert worker.bus.data.is_closed
        assert worker.bus.control.is_closed


async def test_its_load_and_its_counters_are_in_the_beacon(server: EmbeddedNats):
    worker = await Worker.join([server.url], new_worker(), ["prefill"], QUICK)
    worker.load = lambda: LOAD
    worker.add(until_stop)
    async with joined(server.url) as bus:
        beats: list[Beacon] = []
        Membership(bus).on_change.append(beats.append)
        await bus.flush()
        count("things_counted")
        running = asyncio.ensure_future(worker.run())
        await eventually(lambda: any("things_counted" in beat.counters for beat in beats))
        beat = beats[-1]
        assert (beat.free_slots, beat.running, beat.queued, beat.queued_tokens) == (3, 1, 2, 77)
        assert (beat.kv_used, beat.model, beat.max_prompt_tokens) == (0.5, "m", 99)
        worker.stop.set()
        await asyncio.wait_for(running, GIVE_UP_S)


async def test_a_ping_is_answered_as_soon_as_it_joined(server: EmbeddedNats):
    async with joined(server.url) as bus:
        worker = await Worker.join([server.url], new_worker(), ["codec"], TOPOLOGY)
        await worker.bus.flush()
        subject = bus.topology.subject("ping", worker=worker.bus.worker)
        assert await bus.ask(subject, timeout_s=GIVE_UP_S) == b""
        bus.tell(subject, b"")  # without a reply: nothing to answer
        assert await bus.ask(subject, timeout_s=GIVE_UP_S) == b""
        await worker.bus.close()


async def test_a_later_worker_of_the_same_name_has_a_higher_epoch(server: EmbeddedNats):
    name = new_worker()
    first = await Worker.join([server.url], name, ["codec"], TOPOLOGY)
    await first.bus.close()
    second = await Worker.join([server.url], name, ["codec"], TOPOLOGY)
    await second.bus.close()
    assert second.epoch > first.epoch


async def test_services_start_in_order_and_all_are_waited_for(server: EmbeddedNats):
    worker, story = await Worker.join([server.url], new_worker(), ["codec"], TOPOLOGY), []

    def service(name: str, *, early: bool) -> None:
        async def run(stop: asyncio.Event) -> None:
            story.append(f"{name} starts")
            if not early:
                await stop.wait()
            story.append(f"{name} ends")

        worker.add(run)

    service("a", early=True)
    service("b", early=False)
    running = asyncio.ensure_future(worker.run())
    await eventually(lambda: len(story) == 3)
    assert story == ["a starts", "a ends", "b starts"]
    worker.stop.set()
    await asyncio.wait_for(running, GIVE_UP_S)
    assert story[3:] == ["b ends"]


async def test_a_service_that_fails_ends_the_worker_with_its_error(server: EmbeddedNats):
    worker = await Worker.join([server.url], new_worker(), ["codec"], TOPOLOGY)

    async def failing(_stop: asyncio.Event) -> None:
        raise ZeroDivisionError

    worker.add(until_stop)
    worker.add(failing)
    with pytest.raises(ExceptionGroup) as failure:
        await asyncio.wait_for(worker.run(), GIVE_UP_S)
    assert failure.group_contains(ZeroDivisionError)
    await worker.bus.close()


async def test_a_refused_subject_ends_the_start_and_is_named():
    users = '{users: [{user: u, password: u, permissions: {subscribe: {deny: ["v1.ping.>"]}}}]}'
    with EmbeddedNats(settings={"authorization": users}) as guarded:
        url = guarded.url.replace("nats://", "nats://u:u@")
        worker = await Worker.join([url], new_worker(), ["codec"], TOPOLOGY)
        worker.add(until_stop)
        with pytest.raises(SetupError, match=r"v1\.ping"):
            await asyncio.wait_for(worker.run(), GIVE_UP_S)
        await worker.bus.close()


async def test_a_broker_without_jetstream_ends_the_start():
    accounts = "{A: {users: [{user: a, password: a}]}, B: {jetstream: enabled, users: [{user: b, password: b}]}}"
    with EmbeddedNats(settings={"accounts": accounts}) as server, pytest.raises(SetupError, match=r"(?i)jetstream"):
        await Worker.join([server.url.replace("nats://", "nats://a:a@")], new_worker(), ["codec"], TOPOLOGY)


# --- as a process

SCRIPT = """
import asyncio, sys
from pipeline.topology import Topology
from pipeline.worker import Worker

async def serve(stop):
    await stop.wait()
    print("draining", flush=True)
    if sys.argv[3] == "finishes":
        return
    await asyncio.Event().wait()

async def main():
    worker = await Worker.join([sys.argv[1]], sys.argv[2], ["codec"], Topology.load())
    worker.add(serve)
    await worker.run()
    print("done", flush=True)

asyncio.run(main())
"""


class Process:
    """A worker process, and its beacons."""

    def __init__(self, url: str, how: str, tmp_path: Path) -> None:
        self.name = new_worker()
        self.log = tmp_path / "log"
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, str(script), url, self.name, how],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - one prctl call, loaded beforehand
            )

    async def exit_code(self) -> int:
        await eventually(lambda: self.popen.poll() is not None, f"the end of the process: {self.log.read_text()}")
        return self.popen.returncode


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def signum(request: pytest.FixtureRequest) -> signal.Signals:
    number: signal.Signals = request.param
    return number


async def test_a_signal_drains_says_so_in_the_beacon_and_ends_in_order(
    server: EmbeddedNats, tmp_path: Path, signum: signal.Signals
):
    async with joined(server.url, topology=QUICK) as bus:
        membership, beats = Membership(bus), no_beacons()
        membership.on_change.append(beats.append)
        await bus.flush()
        process = Process(server.url, "finishes", tmp_path)
        try:
            await eventually(lambda: len(beats) >= 3)  # it serves
            process.popen.send_signal(signum)
            assert await process.exit_code() == 0
            assert process.log.read_text().split()[-2:] == ["draining", "done"]
            await bus.flush()
            assert beats[-1].draining
            assert membership.fresh("codec") == []
        finally:
            process.popen.kill()
            process.popen.wait()


async def test_a_second_signal_ends_it_at_once(server: EmbeddedNats, tmp_path: Path):
    async with joined(server.url, topology=QUICK) as bus:
        membership, beats = Membership(bus), no_beacons()
        membership.on_change.append(beats.append)
        await bus.flush()
        process = Process(server.url, "hangs", tmp_path)
        try:
            await eventually(lambda: beats)
            process.popen.send_signal(signal.SIGTERM)
            await eventually(lambda: "draining" in process.log.read_text())
            assert process.popen.poll() is None
            process.popen.send_signal(signal.SIGTERM)
            assert await process.exit_code() == 130
        finally:
            process.popen.kill()
            process.popen.wait()
