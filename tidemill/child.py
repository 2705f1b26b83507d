"""One supervised child process: start, heartbeat, log, and how long to wait before starting it again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.errors import ConfigError
from tidemill.heartbeat import HEARTBEAT_FD_VARIABLE
from tidemill.parent_death import die_with_parent

LOG_KEPT_BYTES = 8 << 20  # a longer log becomes `.log.1` at the next start: at most twice this per child and restart
TAIL_BYTES = 16 << 10
WATCH_TICKS = 10  # how often the heartbeat is looked at within `hang_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run under which name.

    `tier`: children of a higher tier are stopped, and have ended, before those of a lower one are.
    `beats`: it calls `tidemill.heartbeat.beat` when it serves; a child that does not is ready once it was started.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    tier: int = 0
    beats: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How patient a supervisor is. Defaults: ours, for workers that start in seconds."""

    pause_s: float = 0.1  # before the first restart, doubling
    pause_max_s: float = 5.0
    healthy_s: float = 30.0  # a child that ran this long starts again with the first pause
    crash_exits: int = 5  # that many ends ...
    crash_window_s: float = 60.0  # ... within this are a crash loop; a worker takes up to 5 s to fail
    hang_s: float = 10.0  # silence of a heart that has beaten
    drain_s: float = 35.0  # from SIGTERM to SIGKILL: limits.drain_s of topics.yaml and 5 s
    crash_drain_s: float = 5.0  # the same when a crash loop stops the set


class Child:
    """A child process across its restarts. Use it from one event loop, the main thread's."""

    def __init__(self, spec: ChildSpec, *, log_dir: Path, policy: Policy) -> None:
        self.spec = spec
        self.log_path = log_dir / f"{spec.name}.log"
        self.ready = asyncio.Event()  # has beaten once, in its first life
        self.stopping = asyncio.Event()  # nobody wants it back
        self.num_starts = 0
        self._policy = policy
        self._process: asyncio.subprocess.Process | None = None
        self._heart: int | None = None  # our end of the heartbeat pipe
        self._beaten = False
        self._silent_ticks = 0
        self._started_at = 0.0
        self._pause_s = policy.pause_s
        self._ends: deque[float] = deque(maxlen=policy.crash_exits)

    @property
    def name(self) -> str:
        """Its name, also of its log file."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Process id while it lives."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Start it.

        Raises:
            OSError: the program cannot be executed.
        """
        heart, childs_end = os.pipe()
        try:
            await self._spawn(childs_end)
        except BaseException:
            os.close(heart)
            raise
        finally:
            os.close(childs_end)
        self._watch(heart)
        self.num_starts += 1
        self._started_at = asyncio.get_running_loop().time()
        if not self.spec.beats:
            self.ready.set()

    async def wait(self) -> str | None:
        """Wait until it has ended. Why we killed it, or None when it ended by itself."""
        assert self._process is not None, "not started"  # noqa: S101 - an internal order, not input
        ended = asyncio.create_task(self._process.wait())
        reason = None
        try:
            while not (await asyncio.wait([ended], timeout=self._policy.hang_s / WATCH_TICKS))[0]:
                # Ticks of ours, not seconds of the clock: while we are stopped ourselves, no child falls silent.
                self._silent_ticks += 1
                if self._beaten and self._silent_ticks > WATCH_TICKS and reason is None:
                    reason = f"was hung (no heartbeat for {self._policy.hang_s:g} s) and was killed"
                    self.send(signal.SIGKILL)
        finally:
            ended.cancel()
        self._unwatch()
        return reason

    def ending(self) -> str:
        """How the last life ended, for people."""
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def pause_before_restart(self) -> float | None:
        """Count an end that nobody asked for: seconds to wait before `start`, or None to give up (see `verdict`)."""
        now = asyncio.get_running_loop().time()
        if now - self._started_at >= self._policy.healthy_s:
            self._pause_s = self._policy.pause_s
        self._ends.append(now)
        if self._is_misconfigured() or self._is_crash_loop():
            return None
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._policy.pause_max_s)
        return pause_s

    def verdict(self) -> str:
        """Why `pause_before_restart` gave up, to follow `ending`."""
        if self._is_misconfigured():
            return " and cannot run as configured"
        seconds = self._ends[-1] - self._ends[0]
        return f", its end number {len(self._ends)} within {seconds:.0f} s: this is a crash loop"

    def send(self, sig: signal.Signals) -> None:
        """Send a signal if it lives."""
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.send_signal(sig)
            except ProcessLookupError:
                return  # it ended and the loop has not told us yet

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines that it wrote."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-num_lines:])

    async def close(self) -> None:
        """Wait for the end of a killed child and release its pipe."""
        if self._process is not None:
            await self._process.wait()
        self._unwatch()

    async def _spawn(self, childs_end: int) -> None:
        self._rotate_log()
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # what a killed child printed last is in its log
            "PYTHONFAULTHANDLER": "1",  # and so is where it crashed
            **self.spec.env,
            HEARTBEAT_FD_VARIABLE: str(childs_end),
        }
        with self.log_path.open("ab") as log:  # the child writes by itself: its log does not need us alive
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(childs_end,),
                start_new_session=True,  # Ctrl-C at the terminal is for us: we stop children in order
                preexec_fn=die_with_parent(),
            )

    def _watch(self, heart: int) -> None:
        os.set_blocking(heart, False)
        self._heart, self._beaten, self._silent_ticks = heart, False, 0
        asyncio.get_running_loop().add_reader(heart, self._hear)

    def _hear(self) -> None:
        if self._heart is None:
            return
        if not os.read(self._heart, 4096):  # the child closed its end, most likely by ending
            self._unwatch()
            return
        self._beaten, self._silent_ticks = True, 0
        self.ready.set()

    def _unwatch(self) -> None:
        if self._heart is not None:
            asyncio.get_running_loop().remove_reader(self._heart)
            os.close(self._heart)
            self._heart = None

    def _is_misconfigured(self) -> bool:
        return self._process is not None and self._process.returncode == ConfigError.exit_code

    def _is_crash_loop(self) -> bool:
        full = len(self._ends) == self._policy.crash_exits
        return full and self._ends[-1] - self._ends[0] <= self._policy.crash_window_s

    def _rotate_log(self) -> None:
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_KEPT_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
