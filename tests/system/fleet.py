"""Real processes for the system tests: one broker's workers, and a view of their beacons."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from pipeline.bus import Bus
from pipeline.events import Beacon
from pipeline.membership import Membership
from pipeline.topology import Topology
from tidemill.parent_death import die_with_parent

ROOT = Path(__file__).parents[2]
GIVE_UP_S = 60.0  # a safety net, far above what anything here takes
STAGES = ("codec", "lookup", "prefill", "decode")


class Worker:
    """One `tidemill worker` process."""

    def __init__(self, name: str, stages: Sequence[str], process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.stages = tuple(stages)
        self.process = process
        self.log_path = log_path
        self._asked_to_stop = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, signum: signal.Signals) -> None:
        """Only ever to a process of our own that we have not reaped."""
        if self.alive:
            self.process.send_signal(signum)

    def drain(self) -> None:
        """Ask it to stop; once, for a second time means at once."""
        if not self._asked_to_stop:
            self._asked_to_stop = True
            self.signal(signal.SIGTERM)

    def wait(self) -> int:
        """Its exit code."""
        return self.process.wait(GIVE_UP_S)

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")


class Fleet:
    """The workers of one broker. Ends exactly the processes that it started."""

    def __init__(self, url: str, log_dir: Path) -> None:
        self.url = url
        self.workers: dict[str, Worker] = {}
        self._log_dir = log_dir

    def start(self, *stages: str, name: str = "", engine: str = "stub", **options: Any) -> Worker:
        """Start a worker; `ready` waits for it."""
        name = name or f"{stages[0]}-{len(self.workers)}"
        settings = [part for key, value in options.items() for part in ("--option", f"{key}={value}")]
        argv = [sys.executable, "-m", "tidemill", "worker", *stages, "--nats", self.url, "--engine", engine]
        log_path = self._log_dir / f"{name}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [*argv, "--id", name, *settings],
                cwd=ROOT,
                env={key: value for key, value in os.environ.items() if not key.startswith("TIDEMILL_")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - one prctl call, loaded beforehand
            )
        worker = self.workers[name] = Worker(name, stages, process, log_path)
        return worker

    def start_all(self, *, engine: str = "stub", suffix: str = "0", **options: Any) -> None:
        """One worker per stage, `codec-0` and so on; `options` go to each."""
        for stage in STAGES:
            self.start(stage, name=f"{stage}-{suffix}", engine=engine, **options)

    def __getitem__(self, name: str) -> Worker:
        return self.workers[name]

    @contextmanager
    def running(self, *stages: str, name: str, **options: Any) -> Iterator[Worker]:
        """A worker for the time of the body."""
        worker = self.start(*stages, name=name, **options)
        try:
            yield worker
        finally:
            self.end(worker)

    async def ready(self) -> None:
        """Return once every living worker announces itself and prefill's regions can be found by decode."""
        async with watching(self.url) as watch:
            wanted = {worker.name for worker in self.workers.values() if worker.alive}
            with contextlib.suppress(TimeoutError):
                await watch.until(lambda: wanted <= set(watch.beacons) or any(not self[n].alive for n in wanted))
            late = wanted - set(watch.beacons)
            assert not late, "".join(f"\n{name} is not there:\n{self[name].log()[-2000:]}" for name in late)

    def end(self, worker: Worker) -> int:
        """Stop one worker in order; its exit code."""
        worker.drain()
        try:
            code = worker.wait()
        except subprocess.TimeoutExpired:
            worker.process.kill()
            code = worker.wait()
        del self.workers[worker.name]
        return code

    def stop(self) -> None:
        """End everything, owners first."""
        for tier in (("codec",), STAGES):
            for worker in [w for w in self.workers.values() if set(w.stages) & set(tier)]:
                worker.drain()
            for worker in [w for w in self.workers.values() if set(w.stages) & set(tier)]:
                self.end(worker)


class Watch:
    """What the beacons say, as they come in."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.membership = Membership(bus)
        self.counters: dict[str, dict[str, int]] = {}
        self.num_beats = 0
        self._heard = asyncio.Event()
        self.membership.on_change.append(self._on_beacon)

    def _on_beacon(self, beacon: Beacon) -> None:
        if beacon.counters:
            self.counters[beacon.worker] = beacon.counters
        self.num_beats += 1
        self._heard.set()

    @property
    def beacons(self) -> dict[str, Beacon]:
        return {member.beacon.worker: member.beacon for member in self.membership}

    def count(self, name: str, stage: str = "") -> int:
        """A counter, summed over the workers of a stage (or all)."""
        workers = [w for w, beacon in self.beacons.items() if not stage or stage in beacon.roles]
        return sum(self.counters.get(worker, {}).get(name, 0) for worker in workers)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when it holds; it is looked at after every beacon. Raises: TimeoutError."""
        async with asyncio.timeout(GIVE_UP_S):
            while not condition():
                self._heard.clear()
                await self._heard.wait()


@asynccontextmanager
async def watching(url: str, *names: str) -> AsyncIterator[Watch]:
    """A connection that hears beacons for the time of the body, those of `names` already before it."""
    bus = await Bus.connect([url], "system-test", Topology.load(), single=True)
    try:
        watch = Watch(bus)
        await watch.until(lambda: set(names) <= set(watch.beacons))
        yield watch
    finally:
        await bus.close()
