"""`tidemill up`: a whole set on one machine, with an embedded NATS server unless another is named."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.child import ChildSpec
from tidemill.nats_server import POLL_S, START_TIMEOUT_S
from tidemill.nats_setup import NatsServerError, NatsSetup
from tidemill.state import UpState, new_log_dir, read_state, remove_state, write_state
from tidemill.supervisor import Report, Supervisor, supervised

PROGRESS_S = 5.0  # how often a slow start says what it waits for
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Which stages share a process, in the order in which they start: those that others need come first. On the way out the
# owners (codec) finish what they hold while the engines still run: a higher tier.
WORKERS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "decode": (("decode", "transfer"), 1),
    "prefill": (("prefill",), 1),
    "lookup": (("lookup",), 1),
    "codec": (("codec", "parse"), 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What to run.

    `counts`: workers per name of WORKERS, one each unless given. `options`: handed to every worker as it is.
    `program`: the command that becomes a worker when `worker STAGE...` follows.
    """

    engine: str = "torch"
    nats: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    store_dir: Path | None = None
    log_dir: Path | None = None
    log_level: str = "info"
    options: Mapping[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = (sys.executable, "-m", "tidemill")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSet:
    """A running set: where its NATS server is, its workers, and where they log."""

    nats: tuple[str, ...]
    workers: Supervisor
    log_dir: Path

    async def wait_ready(self, report: Report) -> None:
        """Return when every worker serves; say every few seconds which do not yet."""
        ready = asyncio.create_task(self.workers.wait_ready())
        try:
            while not (await asyncio.wait([ready], timeout=PROGRESS_S))[0]:
                report(f"still starting: {', '.join(self.workers.waiting_for())}")
        finally:
            ready.cancel()


def worker_specs(options: UpOptions, nats: tuple[str, ...]) -> list[ChildSpec]:
    """The workers of a set, as children for a Supervisor, in starting order."""
    return [
        ChildSpec(name=f"{name}-{index}", argv=_worker_argv(options, nats, stages, f"{name}-{index}"), tier=tier)
        for name, (stages, tier) in WORKERS.items()
        for index in range(options.counts.get(name, 1))
    ]


def _worker_argv(options: UpOptions, nats: tuple[str, ...], stages: tuple[str, ...], worker_id: str) -> tuple[str, ...]:
    extra = (part for key, value in options.options.items() for part in ("--option", f"{key}={value}"))
    return (
        *options.program,
        *("worker", *stages),
        *("--nats", ",".join(nats)),
        *("--engine", options.engine),
        *("--id", worker_id),
        *("--log-level", options.log_level),
        *extra,
    )


@asynccontextmanager
async def broker(options: UpOptions, *, log_dir: Path, report: Report) -> AsyncIterator[tuple[str, ...]]:
    """The URLs of the NATS servers that `options` names, else of an embedded one that lives as long as the body.

    Raises:
        NatsServerError: the embedded one does not serve.
        SupervisionError: it does not stay alive.
    """
    if options.nats:
        yield options.nats
        return
    setup = NatsSetup(store_dir=options.store_dir)
    spec = ChildSpec(name="nats-server", argv=setup.argv, beats=False)
    try:
        async with supervised([spec], log_dir=log_dir, report=report):
            yield (await _served_by(setup),)
    finally:
        setup.close()


async def _served_by(setup: NatsSetup) -> str:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while (url := setup.find_url()) is None:  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise NatsServerError(f"the embedded nats-server does not serve after {START_TIMEOUT_S:.0f} s") from None
    setup.pin_port(url)  # a restarted one is found where it was
    return url


@asynccontextmanager
async def local_set(options: UpOptions, *, report: Report) -> AsyncIterator[LocalSet]:
    """A running set for the time of the body; its workers may still be starting (see `LocalSet.wait_ready`).

    Needs an event loop in the main thread.

    Raises:
        CommandError: the set cannot be started or kept alive.
    """
    log_dir = options.log_dir or new_log_dir()
    async with (
        broker(options, log_dir=log_dir, report=report) as nats,
        supervised(worker_specs(options, nats), log_dir=log_dir, report=report) as workers,
    ):
        yield LocalSet(nats=nats, workers=workers, log_dir=log_dir)


async def serve(options: UpOptions, *, say: Callable[[str], None], report: Report) -> None:
    """Run a set until SIGINT, SIGTERM or SIGHUP; a second signal does not wait for requests in hand.

    Args:
        say: gets the one line that a person or script waits for: where it serves and how to send.
        report: gets what happens meanwhile.

    Raises:
        CommandError: the set cannot be started or kept alive.
    """
    stop = asyncio.Event()
    _on_signals(stop.set)
    try:
        async with local_set(options, report=report) as running:
            # the first signal ends the wait below, which stops the workers in order; a second asks them again: at once
            _on_signals(lambda: running.workers.request_stop() if stop.is_set() else stop.set())
            if await _ready_before(stop, running, report):
                _leave_word(running, report)
                say(
                    f'tidemill serves at {",".join(running.nats)} ({options.engine} engine); try: tidemill send "Hello"'
                )
                await stop.wait()
            report("stopping when the requests in hand are done; interrupt once more to stop at once")
    finally:
        remove_state(os.getpid())


def _on_signals(action: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for sig in STOP_SIGNALS:
        if signal.getsignal(sig) is not signal.SIG_IGN:  # nohup and background jobs of a shell ignore some
            loop.add_signal_handler(sig, action)


async def _ready_before(stop: asyncio.Event, running: LocalSet, report: Report) -> bool:
    """Whether every worker serves before a stop is wanted."""
    waits = [asyncio.create_task(running.wait_ready(report)), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return not stop.is_set()


def _leave_word(running: LocalSet, report: Report) -> None:
    other = read_state()
    if other is not None and other.pid != os.getpid():
        report(f"another `tidemill up` (process {other.pid}) runs; send, ps and cancel now find this one")
    write_state(UpState(pid=os.getpid(), nats=running.nats, log_dir=str(running.log_dir)))
    report(f"logs are in {running.log_dir}")
