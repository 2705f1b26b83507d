"""An embedded NATS server on a free loopback port, for tests and scripts.

`tidemill up` gives the same `NatsSetup` to its supervisor instead, which restarts a server that died.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tidemill.nats_setup import NatsServerError, NatsSetup
from tidemill.parent_death import die_with_parent

START_TIMEOUT_S = 20.0  # it takes 20 ms on an idle machine, and recovers a large store first
STOP_TIMEOUT_S = 10.0
POLL_S = 0.005


class EmbeddedNats:
    """One running `nats-server`, for tests and scripts: `with` or `async with` starts and stops it.

    Start it from the main thread: the server dies with the thread that started it (see `die_with_parent`).

    Args:
        store_dir, settings, jetstream: as for NatsSetup.
    """

    def __init__(
        self,
        *,
        store_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        jetstream: Mapping[str, str] | None = None,
    ) -> None:
        self.setup = NatsSetup(store_dir=store_dir, settings=settings, jetstream=jetstream)
        self.log_path = self.setup.folder / "nats-server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """Where it listens; the same after every restart.

        Raises:
            NatsServerError: it was never started.
        """
        if self._url is None:
            raise NatsServerError("the embedded nats-server was not started")
        return self._url

    @property
    def pid(self) -> int | None:
        """Process id of the running server, None when there is none."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def start(self) -> str:
        """Start (again, after `kill`) and wait until it serves; the URL.

        Raises:
            NatsServerError: it ended or did not serve in time; the message has its last log lines.
        """
        self._spawn()
        while (url := self._check()) is None:
            time.sleep(POLL_S)
        return url

    def kill(self) -> None:
        """End it as a crash would; the store and the port stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.setup.clear_ports()

    def stop(self) -> None:
        """End it in order, give the store free, and remove what was temporary."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self.setup.close()

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines of its log."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self._spawn()  # on this thread; only the waiting is asynchronous
        try:
            while self._check() is None:  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def _spawn(self) -> None:
        if self.pid is not None:
            raise NatsServerError(f"the embedded nats-server runs already, process {self.pid}")
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own argv
                self.setup.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us; we stop it when its clients are done
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - one prctl call, loaded beforehand
            )
        self._deadline = time.monotonic() + START_TIMEOUT_S

    def _check(self) -> str | None:
        url = self.setup.find_url()
        if url is not None:
            self.setup.pin_port(url)
            self._url = url
            return url
        if self.pid is None:
            raise NatsServerError(f"nats-server ended while starting:\n{self.log_tail()}")
        if time.monotonic() > self._deadline:
            raise NatsServerError(f"nats-server does not serve after {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}")
        return None
