"""The bus of one worker: two NATS connections, callbacks only.

`data` carries requests, frames and events, and with them the pulls, in-progress signs and acknowledgements of intake;
`control` carries answers, cancels, beacons and the calls of the JetStream API, so that a cancel never queues behind
tokens. Source: facts-bus 4.3, 6, 10, 11.1.

Publishing while disconnected is refused and counted, never buffered: whoever published has a timer that repeats
what matters, and a buffered message would reach peers that have not subscribed again yet (facts-bus 8.1).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import nats.errors
import structlog

from pipeline.busclient import BusDisconnected, BusOverrun, Client, PayloadTooLargeError
from pipeline.clockwork import within
from pipeline.errors import SetupError, TransientError
from pipeline.fastnats import make_client
from pipeline.metrics import count
from pipeline.topology import Topology

log = structlog.get_logger()

REPEAT_LOG_S = 5.0  # the same error again is logged that often. Source: ours

OnMessage = Callable[[str, str, bytes, bytes | None], None]

# A broker that allows less cannot carry a prefill offer of a long prompt. Source: ours (design 2.10).
MIN_PAYLOAD_BYTES = 262_144
# nats-py alone would try for ever (max_reconnect_attempts=-1). Longer than a broker takes to restart. Source: ours
CONNECT_TIMEOUT_S = 5.0


_USER_INFO = re.compile(r"//[^/@]*@")


def _without_secrets(urls: Sequence[str]) -> str:
    """URLs as they may stand in a log: what comes before the @ is a password or a token."""
    return ", ".join(_USER_INFO.sub("//", url) for url in urls)


class Bus:
    """Publish, subscribe and ask; owns both connections from `connect` until `close`."""

    def __init__(self, worker: str, topology: Topology, data: Client, control: Client) -> None:
        self.worker = worker
        self.topology = topology
        self.data = data
        self.control = control
        self._on_reconnect: list[Callable[[], None]] = []
        self._denied: list[str] = []
        self._logged = ("", 0.0)
        self._last_error = ""

    @classmethod
    async def connect(
        cls,
        urls: Sequence[str],
        worker: str,
        topology: Topology,
        *,
        fast: bool = True,
        single: bool = False,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Bus:
        """Open the connections; `single`: one serves as both (clients).

        Raises: SetupError when no broker answers or it allows too small messages.
        """
        data = make_client(fast)
        bus = cls(worker, topology, data, data if single else make_client(fast))
        if not single:
            # answers and notes may come a socket write later; the request that caused them should not
            bus.control.after = bus.data
        try:
            await within(timeout_s, bus._open_all(list(urls), single=single))
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await bus.close()
            why = bus._last_error or repr(error)
            raise SetupError(f"no NATS server answers at {_without_secrets(urls)}: {why}") from error
        if bus.data.max_payload < MIN_PAYLOAD_BYTES:
            allowed = bus.data.max_payload
            await bus.close()
            raise SetupError(f"max_payload of the broker is {allowed} bytes, at least {MIN_PAYLOAD_BYTES} are needed")
        return bus

    async def _open_all(self, urls: list[str], *, single: bool) -> None:
        await self._open(self.data, urls, f"{self.worker}/data", self._reconnected)
        if not single:
            await self._open(self.control, urls, f"{self.worker}/control", None)

    def _is_news(self, text: str) -> bool:
        """Whether to log it: a broker that is away is tried ten times a second, and says the same each time."""
        now = time.monotonic()
        if text == self._logged[0] and now - self._logged[1] < REPEAT_LOG_S:
            return False
        self._logged = (text, now)
        return True

    async def _open(self, client: Client, urls: list[str], name: str, on_reconnect: Any) -> None:
        async def on_error(error: Exception) -> None:
            count("bus_errors")
            news = self._is_news(f"{name}: {error}")
            if "authorization" not in self._last_error.lower():
                # the broker may cut a refused connection before it has said why; what it said once explains them all
                self._last_error = str(error)
            if "permissions violation" in str(error).lower():
                self._denied.append(str(error))
            if news:
                log.warning("bus error", connection=name, error=str(error))

        async def on_disconnect() -> None:
            count("bus_disconnects")

        async def reconnected() -> None:
            log.info("bus reconnected", connection=name)
            if on_reconnect:
                on_reconnect()

        async def lame_duck() -> None:
            # nats-py itself does nothing; waiting costs the connection a second later (facts-bus 8.3)
            await client.force_reconnect()

        # Values: facts-bus 11.9. Defaults give up after 60 tries and notice a dead server after 4 minutes.
        await client.connect(
            servers=urls,
            name=name,
            error_cb=on_error,
            disconnected_cb=on_disconnect,
            reconnected_cb=reconnected,
            lame_duck_mode_cb=lame_duck,
            allow_reconnect=True,
            reconnect_time_wait=0.1,
            max_reconnect_attempts=-1,
            ping_interval=2,
            max_outstanding_pings=2,
            connect_timeout=2,
            inbox_prefix=f"_INBOX.{self.worker}",
        )

    def on_reconnect(self, call: Callable[[], None]) -> None:
        """Call this after every reconnect of the data connection (pulls must be issued again)."""
        self._on_reconnect.append(call)

    def _reconnected(self) -> None:
        for call in self._on_reconnect:
            try:
                call()
            except Exception:
                # the others must pull again and resume all the same: a bug of one costs only itself
                log.exception("a reconnect callback failed")
                count("reconnect_callbacks_failed")

    @property
    def max_inline_bytes(self) -> int:
        """The largest body that travels inline: a share of the live `max_payload`."""
        return int(self.data.max_payload * self.topology.limits.inline_share)

    def publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Send on the data connection; False (and a counter) when it is down or the message too large."""
        return self._publish(self.data, subject, payload, reply)

    def push(self) -> None:
        """Write what was published on the data connection now (see Client.push): a request waits for it."""
        self.data.push()

    def tell(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Send on the control connection; False (and a counter) when it is down."""
        return self._publish(self.control, subject, payload, reply)

    @staticmethod
    def _publish(client: Client, subject: str, payload: bytes, reply: str) -> bool:
        try:
            client.publish_nowait(subject, payload, reply)
        except PayloadTooLargeError as error:
            count("publish_too_large")
            log.warning("message too large", subject=subject, error=str(error))
            return False
        except BusDisconnected:
            count("publish_disconnected")
            return False
        except BusOverrun:
            count("publish_overrun")
            return False
        return True

    def subscribe(self, subject: str, call: OnMessage, *, group: str = "", control: bool = False) -> Any:
        """Dispatch messages synchronously to `call(subject, reply, payload, headers)`."""
        client = self.control if control else self.data
        return client.subscribe_sync(subject, call, queue=group)

    async def ask(self, subject: str, payload: bytes = b"", timeout_s: float = 2.0) -> bytes:
        """Request and reply on the control connection.

        Raises: TransientError when nobody answers in time or the broker is away.
        """
        if not self.control.is_connected:
            # nats-py would keep the request and send it after the reconnect, when nobody waits for the answer
            count("publish_disconnected")
            raise TransientError(f"no answer on {subject}: not connected")
        try:
            answer = await self.control.request(subject, payload, timeout=timeout_s)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise TransientError(f"no answer on {subject}: {error!r}") from error
        return bytes(answer.data)

    async def ask_json(self, subject: str, request: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
        """A JetStream API call.

        Raises: TransientError when there is no answer.
        """
        answer: dict[str, Any] = json.loads(await self.ask(subject, json.dumps(request).encode(), timeout_s))
        return answer

    async def flush(self) -> None:
        """Everything published so far has reached the broker when this returns (or it is away)."""
        for client in (self.data, self.control):
            try:
                await client.flush(timeout=2)
            except (nats.errors.Error, TimeoutError):
                count("flush_failed")

    async def check_permissions(self) -> None:
        """Raises: SetupError naming every subject that the broker has refused so far."""
        await self.flush()
        if self._denied:
            raise SetupError(f"the broker refuses {len(self._denied)} subjects: {'; '.join(sorted(set(self._denied)))}")

    async def close(self) -> None:
        """Close both connections."""
        for client in {self.data, self.control}:
            if not client.is_closed:
                await client.close()
