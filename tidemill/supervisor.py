"""Keeps a set of child processes alive: starts, watches, restarts, and stops them in order.

A child that ends is started again after a pause that doubles; one that keeps ending is a crash loop, which stops the
whole set and shows the child's last words; one whose heartbeat falls silent is killed. Children never outlive us.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tidemill.child import Child, ChildSpec, Policy
from tidemill.errors import CommandError

Report = Callable[[str], None]


class SupervisionError(CommandError):
    """The set cannot be kept alive. The message names the child and quotes its last log lines."""


class Supervisor:
    """Runs `specs` until told to stop.

    Children start in the order given. They stop by tier, the highest first, each tier when the one above it has ended:
    what others need while they finish (the broker, the engines) has a lower tier. Until its turn a child is still
    restarted.

    Args:
        specs: the children; names are unique.
        log_dir: gets one log file per child, `<name>.log`; made if missing.
        policy: how patient we are.
        report: told one line for people about everything that happens.

    Raises:
        ValueError: two children have one name.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        log_dir: Path,
        policy: Policy | None = None,
        report: Report = lambda _: None,
    ) -> None:
        if len({spec.name for spec in specs}) != len(specs):
            raise ValueError(f"child names are not unique: {sorted(spec.name for spec in specs)}")
        log_dir.mkdir(parents=True, exist_ok=True)
        self.policy = policy or Policy()
        self.children = {spec.name: Child(spec, log_dir=log_dir, policy=self.policy) for spec in specs}
        self._report = report
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def request_stop(self) -> None:
        """Stop in order; asked a second time, at once. Safe in a signal handler of the loop."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def wait_ready(self) -> None:
        """Return when every child that beats has beaten; cancel it when `run` ends first."""
        for child in self.children.values():
            await child.ready.wait()

    def waiting_for(self) -> list[str]:
        """Names of the children that have not been ready yet."""
        return [name for name, child in self.children.items() if not child.ready.is_set()]

    async def run(self) -> None:
        """Start all, keep them alive, and return when all have ended after `request_stop`.

        Cancelled, it stops the children in the same way first.

        Raises:
            SupervisionError: a crash loop, or a child that says it can never run (ConfigError).
        """
        keepers: dict[str, asyncio.Task[None]] = {}
        drain_s = self.policy.drain_s
        try:
            for name, child in self.children.items():
                await self._start(child)
                keepers[name] = asyncio.create_task(self._keep(child), name=f"keep {name}")
            await self._until_stop_or_failure(list(keepers.values()))
        except SupervisionError:
            drain_s = self.policy.crash_drain_s  # what is left cannot finish its work anyway
            raise
        finally:
            await self._stop_all(keepers, drain_s)

    async def _until_stop_or_failure(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        for task in done - {stop}:
            task.result()  # a keeper ends before the stop only by its error

    async def _start(self, child: Child) -> None:
        try:
            await child.start()
        except OSError as error:
            raise SupervisionError(f"{child.name} cannot be started: {error}") from error

    async def _keep(self, child: Child) -> None:
        """Watch one child and restart it until its stop is wanted."""
        while True:
            killed = await child.wait()
            if child.stopping.is_set():
                return
            ending = f"{child.name} {killed or child.ending()}"
            pause_s = child.pause_before_restart()
            if pause_s is None:
                raise SupervisionError(f"{ending}{child.verdict()}; its last log lines:\n{child.log_tail()}")
            self._report(f"{ending}; starting it again in {pause_s:.1f} s")
            if await _happens(child.stopping, pause_s):
                return
            await self._start(child)
            if child.stopping.is_set():  # the stop came while it was being started, and its signal too early
                child.send(signal.SIGKILL)

    async def _stop_all(self, keepers: dict[str, asyncio.Task[None]], drain_s: float) -> None:
        """Stop tier by tier within one common time, or until hurried, then kill what is left."""
        drain = asyncio.create_task(self._drain(keepers))
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            done, _ = await asyncio.wait([drain, hurry], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._report(f"{', '.join(self._alive())} did not end within {drain_s:g} s: killed")
        finally:
            drain.cancel()
            hurry.cancel()
            await self._kill_all(keepers)

    async def _kill_all(self, keepers: dict[str, asyncio.Task[None]]) -> None:
        for child in self.children.values():
            child.stopping.set()
            child.send(signal.SIGKILL)
        await asyncio.gather(*keepers.values(), return_exceptions=True)  # the error that stopped us is raised already
        for child in self.children.values():
            await child.close()

    async def _drain(self, keepers: dict[str, asyncio.Task[None]]) -> None:
        by_tier = sorted(self.children.values(), key=lambda child: child.spec.tier, reverse=True)
        for _, tier in itertools.groupby(by_tier, key=lambda child: child.spec.tier):
            stopped = list(tier)
            for child in stopped:
                child.stopping.set()
                child.send(signal.SIGTERM)
            tasks = [keepers[child.name] for child in stopped if child.name in keepers]
            if tasks:
                await asyncio.wait(tasks)

    def _alive(self) -> list[str]:
        return [name for name, child in self.children.items() if child.pid is not None]


async def _happens(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def supervised(
    specs: Sequence[ChildSpec], *, log_dir: Path, policy: Policy | None = None, report: Report = lambda _: None
) -> AsyncIterator[Supervisor]:
    """A running Supervisor for the time of the body, which is cancelled when the set cannot be kept alive.

    The children are stopped in order on the way out.

    Raises:
        SupervisionError: as `Supervisor.run`.
    """
    supervisor = Supervisor(specs, log_dir=log_dir, policy=policy, report=report)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.run())
            yield supervisor
            supervisor.request_stop()
    except BaseExceptionGroup as errors:  # the group of one that a TaskGroup makes of any error
        raise errors.exceptions[0] from None
