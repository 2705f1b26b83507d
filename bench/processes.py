"""Worker processes of a bench: started, ready, measured by their CPU time, and ended by their process id.

CPU time is that of the whole process, threads that have ended included, by the kernel's own clock of the process.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from tidemill.heartbeat import HEARTBEAT_FD_VARIABLE
from tidemill.nats_server import EmbeddedNats
from tidemill.parent_death import die_with_parent

READY_TIMEOUT_S = 60.0  # a codec worker loads its vocabulary in half a second, on a busy machine in five
DRAIN_TIMEOUT_S = 15.0
ABORT_TIMEOUT_S = 1.0  # after Ctrl-C or a failure nobody waits for answers
BROKER = "nats-server"
_CPUCLOCK_SCHED = 2  # <linux/posix-timers.h>: what clock_getcpuclockid(3) makes of a process id


class ProcessError(RuntimeError):
    """A process of the bench did not start or ended early; the message has its last log lines."""


def cpu_ns(pid: int) -> int:
    """CPU time of a process so far. Raises: OSError when it is gone."""
    return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)


@dataclass(frozen=True, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    log_path: Path


class Fleet:
    """A nats-server and worker processes, by name. `with` starts the server and leaves no process behind."""

    def __init__(self) -> None:
        self._nats = EmbeddedNats()
        self._workers: dict[str, _Worker] = {}
        self._logs = TemporaryDirectory(prefix="tidemill-bench-")
        self._serial = 0

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self._nats.url

    def start(self, stage: str, **options: str) -> str:
        """Start a worker of a stage with the stub engine and wait until it serves; its id.

        options: of the engine, as `--option KEY=VALUE`. Raises: ProcessError.
        """
        arguments = [f"--option={key}={value}" for key, value in options.items()]
        return self.run(stage, "tidemill", "worker", stage, "--nats", self.url, "--engine", "stub", *arguments, "--id")

    def run(self, role: str, module: str, *arguments: str) -> str:
        """Start `python -m module arguments... ID` and wait until its heart beats; the id, unique in this fleet."""
        self._serial += 1
        worker = f"{role}-{self._serial}"
        log_path = Path(self._logs.name) / f"{worker}.log"
        heart, childs_end = os.pipe()
        try:
            with log_path.open("wb") as log:
                process = subprocess.Popen(  # noqa: S603 -- our own module
                    [sys.executable, "-m", module, *arguments, worker],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, HEARTBEAT_FD_VARIABLE: str(childs_end)},
                    pass_fds=(childs_end,),
                    cwd=Path(__file__).parents[1],
                    start_new_session=True,  # Ctrl-C is for us; we end them
                    preexec_fn=die_with_parent(),  # noqa: PLW1509 -- one prctl call, loaded beforehand
                )
            self._workers[worker] = _Worker(process, log_path)
            os.close(childs_end)
            childs_end = -1
            readable, _, _ = select.select([heart], [], [], READY_TIMEOUT_S)
            if not readable or not os.read(heart, 1):
                raise ProcessError(f"{worker} did not start (exit code {process.poll()}):\n{self.log_tail(worker)}")
        finally:
            os.close(heart)  # it may beat on: a heart that nobody hears is harmless
            if childs_end >= 0:
                os.close(childs_end)
        return worker

    def stop(self, *workers: str, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Drain workers, at most `timeout_s` all together; those that do not end are killed."""
        stopping = [self._workers.pop(worker).process for worker in workers]
        for process in stopping:
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + timeout_s
        for process in stopping:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def cpu(self) -> dict[str, int]:
        """CPU nanoseconds so far of the server and of every running worker, by role. Raises: ProcessError."""
        used = {BROKER: cpu_ns(self.pids[BROKER])}
        for worker, running in self._workers.items():
            if running.process.poll() is not None:
                raise ProcessError(f"{worker} ended:\n{self.log_tail(worker)}")
            used[worker.rpartition("-")[0]] = cpu_ns(running.process.pid)
        return used

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the server and of the workers, by name."""
        if self._nats.pid is None:
            raise ProcessError(f"nats-server ended:\n{self._nats.log_tail()}")
        return {BROKER: self._nats.pid} | {name: worker.process.pid for name, worker in self._workers.items()}

    def log_tail(self, worker: str, num_lines: int = 20) -> str:
        """The last lines that a worker wrote."""
        lines = self._workers[worker].log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def __enter__(self) -> Self:
        self._nats.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(*self._workers, timeout_s=DRAIN_TIMEOUT_S if kind is None else ABORT_TIMEOUT_S)
        finally:
            self._nats.stop()
            self._logs.cleanup()


def spent(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """CPU nanoseconds by role between two readings of the same fleet."""
    return {role: after[role] - before[role] for role in before}
