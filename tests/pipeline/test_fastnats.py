"""One contract for both clients, on both event loops, against a real server."""

import asyncio
import functools
import inspect
import os
import shutil
import signal
import ssl
import subprocess
from contextlib import asynccontextmanager
from importlib.metadata import version

import nats.aio.client
import nats.errors
import pytest
import uvloop
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from pipeline import fastnats
from pipeline.fastnats import (
    BusDisconnected,
    BusOverrun,
    FastClient,
    PayloadTooLargeError,
    StockClient,
    format_headers,
    make_client,
    parse_headers,
)
from tidemill.nats_server import EmbeddedNats

FAST_RECONNECT = {"reconnect_time_wait": 0.02, "max_reconnect_attempts": -1, "connect_timeout": 2}


def on_both_loops(test):
    """Run an async test on asyncio's own loop and on uvloop: their transports differ."""
    signature = inspect.signature(test)
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

    @functools.wraps(test)
    def run(loop, **fixtures):
        with asyncio.Runner(loop_factory=loops[loop]) as runner:
            runner.run(test(**fixtures))

    loop_parameter = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [loop_parameter, *signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop", loops)(run)


@pytest.fixture(params=[True, False], ids=["fast", "stock"])
def fast(request):
    return request.param


@pytest.fixture
def own_server():
    with EmbeddedNats() as server:
        yield server


async def ignore(error):
    """For tests that make connections fail on purpose."""
    assert isinstance(error, Exception)


@asynccontextmanager
async def connected(url, *, fast=True, **options):
    client = make_client(fast)
    await client.connect(url, **{"error_cb": ignore, **FAST_RECONNECT, **options})
    try:
        yield client
    finally:
        await client.close()


async def until(condition, timeout_s=10.0):
    """Yield to the loop until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 -- of a real server's doings there is no event
            await asyncio.sleep(0.002)


def pause(server):
    """Stop the server process; it is stopped when this returns."""
    os.kill(server.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)


def resume(server):
    os.kill(server.pid, signal.SIGCONT)


class Inbox(list[tuple[str, str, bytes, bytes | None]]):
    """Collects messages as (subject, reply, payload, headers)."""

    def __call__(self, subject, reply, payload, headers):
        self.append((subject, reply, bytes(payload), headers))

    @property
    def payloads(self):
        return [message[2] for message in self]

    async def have(self, count):
        await until(lambda: len(self) >= count)


def test_nats_py_is_of_the_version_the_fast_client_was_written_for():
    number = tuple(int(part) for part in version("nats-py").split(".")[:2])
    assert fastnats.SUPPORTED[0] <= number < fastnats.SUPPORTED[1]
    assert isinstance(make_client(fast=True), FastClient)
    assert isinstance(make_client(fast=False), StockClient)


def test_every_private_name_of_nats_py_exists_and_is_what_we_take_it_for():
    stock = nats.aio.client.Client
    for name in fastnats.PRIVATE_CLIENT:
        assert callable(getattr(stock, name)), name
    fresh = stock()
    for name in fastnats.PRIVATE_STATE:
        assert hasattr(fresh, name), name
    for name in fastnats.PRIVATE_TRANSPORT:
        assert hasattr(TcpTransport(), name), name
    for name in ("_start", "_stop_processing"):
        assert callable(getattr(Subscription, name)), name
    expected = {
        "_flush_pending": ["self", "force_flush"],
        "_process_msg": ["self", "sid", "subject", "reply", "data", "headers"],
        "_remove_sub": ["self", "sid", "max_msgs"],
        "_send_ping": ["self", "future"],
        "_connect_to_server": ["self", "s"],
        "_close": ["self", "status", "do_cbs"],
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(stock, name)).parameters) == parameters, name
    assert isinstance(fresh._pending, list)
    assert isinstance(fresh._subs, dict)
    assert isinstance(fresh._pongs, list)


@on_both_loops
async def test_ten_thousand_messages_over_two_subjects_arrive_in_order(nats_url, fast):
    inbox = Inbox()
    async with connected(nats_url, fast=fast) as receiver, connected(nats_url, fast=fast) as sender:
        # one wildcard: stock nats-py keeps order within a subscription only (facts-spikes 6.3)
        receiver.subscribe_sync("order.*", inbox)
        await receiver.flush()
        for number in range(10_000):
            sender.publish_nowait("order.even" if number % 2 == 0 else b"order.odd", str(number).encode())
            if number % 100 == 0:
                await sender.drain_if_over()
        await inbox.have(10_000)
    assert inbox.payloads == [str(number).encode() for number in range(10_000)]
    assert {message[0] for message in inbox} == {"order.even", "order.odd"}


@on_both_loops
async def test_the_fast_client_keeps_order_over_subscriptions(nats_url):
    inbox = Inbox()
    async with connected(nats_url) as receiver, connected(nats_url) as sender:
        receiver.subscribe_sync("cross.start", inbox)
        receiver.subscribe_sync("cross.frame", inbox)
        await receiver.flush()
        for number in range(1_000):
            sender.publish_nowait("cross.start" if number % 3 == 0 else "cross.frame", str(number).encode())
        await inbox.have(1_000)
    assert inbox.payloads == [str(number).encode() for number in range(1_000)]


@on_both_loops
async def test_stock_and_hot_publishes_leave_in_one_order(nats_url, fast):
    inbox = Inbox()
    async with connected(nats_url, fast=fast) as receiver, connected(nats_url, fast=fast) as sender:
        receiver.subscribe_sync("mixed", inbox)
        await receiver.flush()
        for number in range(0, 500, 2):
            await sender.publish("mixed", b"%d" % number)
            sender.publish_nowait("mixed", b"%d" % (number + 1))
        await sender.flush()
        await inbox.have(500)
    assert inbox.payloads == [b"%d" % number for number in range(500)]


@on_both_loops
async def test_flush_is_a_barrier_for_what_was_published(nats_url, fast):
    inbox = Inbox()
    async with connected(nats_url, fast=fast) as one, connected(nats_url, fast=fast) as other:
        one.subscribe_sync("barrier", inbox)
        await one.flush()
        for number in range(20):
            other.publish_nowait("barrier", b"x" * 900_000)
            await other.flush()  # at the broker now, big as it is
            await one.flush()  # and, in our own stream, behind it
            for _ in range(3):
                await asyncio.sleep(0)  # stock: the subscription's own task
            assert len(inbox) == number + 1


@on_both_loops
async def test_reply_and_headers_arrive_as_they_were_sent(nats_url, fast):
    inbox = Inbox()
    fields = {"Nats-Msg-Id": "default:abc", "Tm-Note": "a: b"}
    async with connected(nats_url, fast=fast) as client:
        client.subscribe_sync("with.headers", inbox)
        client.publish_nowait("with.headers", b"body", "answer.here", format_headers(fields))
        client.publish_nowait(b"with.headers", b"", b"", format_headers(fields))
        client.publish_nowait("with.headers", b"plain")
        await inbox.have(3)
    assert inbox[0][:3] == ("with.headers", "answer.here", b"body")
    assert parse_headers(inbox[0][3]) == (None, "", fields)
    assert inbox[1][1:3] == ("", b"")
    assert parse_headers(inbox[1][3]) == (None, "", fields)
    assert inbox[2] == ("with.headers", "", b"plain", None)


@on_both_loops
async def test_no_responders_arrives_as_status_503_without_payload(nats_url, fast):
    inbox = Inbox()
    async with connected(nats_url, fast=fast) as client:
        client.subscribe_sync("_INBOX.mine", inbox)
        client.publish_nowait("nobody.listens", b"?", "_INBOX.mine")
        await inbox.have(1)
    assert inbox[0][2] == b""
    assert parse_headers(inbox[0][3])[0] == 503


@on_both_loops
async def test_a_queue_group_hands_each_message_to_one_member(nats_url, fast):
    inboxes = [Inbox(), Inbox(), Inbox()]
    async with connected(nats_url, fast=fast) as client:
        for inbox in inboxes:
            client.subscribe_sync("work", inbox, queue="crew")
        await client.flush()
        for number in range(300):
            client.publish_nowait("work", b"%d" % number)
        await until(lambda: sum(map(len, inboxes)) == 300)
    assert all(inboxes)
    assert sorted(int(payload) for inbox in inboxes for payload in inbox.payloads) == list(range(300))


@on_both_loops
async def test_nothing_arrives_after_unsubscribe_and_a_second_one_is_harmless(nats_url, fast):
    stopped, going = Inbox(), Inbox()
    async with connected(nats_url, fast=fast) as client:
        subscription = client.subscribe_sync("tap", stopped)
        client.subscribe_sync("tap", going)
        client.publish_nowait("tap", b"1")
        await stopped.have(1)
        client.unsubscribe_sync(subscription)
        client.unsubscribe_sync(subscription)
        client.publish_nowait("tap", b"2")
        await going.have(2)
    assert stopped.payloads == [b"1"]


@on_both_loops
async def test_a_callback_may_unsubscribe_itself_in_the_middle_of_a_burst(nats_url, fast):
    seen = []
    async with connected(nats_url, fast=fast) as client:

        def once(subject, reply, payload, headers):
            seen.append(payload)
            client.unsubscribe_sync(subscription)

        subscription = client.subscribe_sync("burst", once)
        other = Inbox()
        client.subscribe_sync("burst", other)
        for number in range(100):
            client.publish_nowait("burst", b"%d" % number)
        await other.have(100)
    assert seen[0] == b"0"
    assert len(seen) == 1


@on_both_loops
async def test_big_payloads_survive_and_bigger_ones_are_refused(nats_url, fast):
    inbox = Inbox()
    async with connected(nats_url, fast=fast) as client:
        client.subscribe_sync("big.>", inbox)
        limit = client.max_payload
        sizes = [limit, 1, 300_000, 16_383, 16_384, 0, limit]
        for size in sizes:
            client.publish_nowait("big.x", bytes([size % 251]) * size)
        with pytest.raises(PayloadTooLargeError) as refused:
            client.publish_nowait("big.x", b"x" * (limit + 1))
        with pytest.raises(PayloadTooLargeError):
            client.publish_nowait("big.x", b"x" * limit, headers=format_headers({"A": "1"}))
        await inbox.have(len(sizes))
        assert client.is_connected
    assert (refused.value.num_bytes, refused.value.limit_bytes) == (limit + 1, limit)
    assert inbox.payloads == [bytes([size % 251]) * size for size in sizes]


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB x 0\r\n", "a\tb", b"a\nb", "a\x00"])
@on_both_loops
async def test_a_subject_that_would_break_the_protocol_is_refused(nats_url, fast, subject):
    async with connected(nats_url, fast=fast) as client:
        with pytest.raises(nats.errors.BadSubjectError):
            client.publish_nowait(subject, b"x")
        if subject:
            with pytest.raises(nats.errors.BadSubjectError):
                client.publish_nowait("good", b"x", subject)
        await client.flush()


@pytest.mark.parametrize("subject", ["", "a b", "a..b", ".a", "a.", "a.>.b", "a.b*", "a.>x", "a\n"])
@on_both_loops
async def test_a_pattern_that_is_none_is_refused(nats_url, fast, subject):
    async with connected(nats_url, fast=fast) as client:
        with pytest.raises(nats.errors.BadSubjectError):
            client.subscribe_sync(subject, Inbox())
        with pytest.raises(nats.errors.BadSubjectError):
            client.subscribe_sync("good", Inbox(), queue="two words")


@on_both_loops
async def test_a_client_that_never_connected_refuses_to_publish_and_subscribe(fast):
    client = make_client(fast)
    with pytest.raises(BusDisconnected):
        client.publish_nowait("a", b"")
    with pytest.raises(BusDisconnected):
        client.subscribe_sync("a", Inbox())


@on_both_loops
async def test_callbacks_that_raise_are_counted_reported_and_do_no_harm(nats_url, fast):
    reported, after = [], Inbox()
    async with connected(nats_url, fast=fast) as client:
        client.on_callback_error = lambda error, where: reported.append((type(error), where))

        def fails(subject, reply, payload, headers):
            if payload == b"cancelled":
                raise asyncio.CancelledError
            raise LookupError(payload)

        client.subscribe_sync("fails", fails)
        client.subscribe_sync("works", after)
        for payload in (b"1", b"cancelled", b"3"):
            client.publish_nowait("fails", payload)
        client.publish_nowait("works", b"alive")
        await after.have(1)
        await until(lambda: client.callback_errors == 3)
        assert client.is_connected
    assert reported == [(LookupError, "fails"), (asyncio.CancelledError, "fails"), (LookupError, "fails")]


@on_both_loops
async def test_an_error_hook_that_raises_does_no_harm_either(nats_url, fast):
    inbox = Inbox()
    async with connected(nats_url, fast=fast) as client:

        def hook(error, where):
            raise RuntimeError(where)

        client.on_callback_error = hook
        client.subscribe_sync("hook.fails", lambda *_: 1 / 0)
        client.subscribe_sync("hook.works", inbox)
        client.publish_nowait("hook.fails", b"")
        client.publish_nowait("hook.works", b"alive")
        await inbox.have(1)


@on_both_loops
async def test_nats_py_callbacks_that_raise_neither_deafen_nor_strand_the_client(own_server, fast):
    inbox, raised = Inbox(), []

    async def fails(*_):
        raised.append(1)
        raise RuntimeError("from a callback of nats-py")

    names = ("error_cb", "disconnected_cb", "reconnected_cb")
    async with connected(own_server.url, fast=fast, **dict.fromkeys(names, fails)) as client:
        client.on_callback_error = lambda error, where: None
        client.subscribe_sync("still.here", inbox)
        own_server.kill()
        await until(lambda: not client.is_connected)
        own_server.start()
        await until(lambda: client.is_connected and client.stats["reconnects"] == 1)
        client.publish_nowait("still.here", b"1")
        await inbox.have(1)
    assert client.callback_errors >= 2


@on_both_loops
async def test_subscriptions_live_again_after_the_server_was_killed_and_restarted(own_server, fast):
    before, during, gone = Inbox(), Inbox(), Inbox()
    async with connected(own_server.url, fast=fast) as client, connected(own_server.url, fast=fast) as sender:
        client.subscribe_sync("life.*", before)
        dropped = client.subscribe_sync("life.*", gone)
        await client.flush()
        sender.publish_nowait("life.1", b"first")
        await before.have(1)
        for round_number in (1, 2):
            own_server.kill()
            await until(lambda: not client.is_connected and not sender.is_connected)
            with pytest.raises(BusDisconnected):
                sender.publish_nowait("life.2", b"into the void")
            if round_number == 1:
                client.subscribe_sync("during", during)
                client.unsubscribe_sync(dropped)
            own_server.start()
            reconnects = (client, sender)
            await until(lambda n=round_number, both=reconnects: all(c.stats["reconnects"] == n for c in both))
            await client.flush()
            sender.publish_nowait("life.3", b"again %d" % round_number)
            sender.publish_nowait("during", b"too %d" % round_number)
            await during.have(round_number)
    assert before.payloads == [b"first", b"again 1", b"again 2"]
    assert during.payloads == [b"too 1", b"too 2"]
    assert gone.payloads == [b"first"]


@on_both_loops
async def test_a_forced_reconnect_in_the_middle_of_traffic_loses_no_subscription(nats_url, fast):
    inbox = Inbox()
    async with connected(nats_url, fast=fast) as client, connected(nats_url, fast=fast) as sender:
        client.subscribe_sync("forced", inbox)
        await client.flush()
        for round_number in range(1, 6):
            for _ in range(200):
                sender.publish_nowait("forced", b"x" * 5_000)
            await asyncio.sleep(0)
            await client.force_reconnect()
            await until(lambda n=round_number: client.is_connected and client.stats["reconnects"] == n)
            await client.flush()
            seen = len(inbox)
            sender.publish_nowait("forced", b"after")
            await until(lambda n=seen: len(inbox) > n and inbox.payloads[-1] == b"after")
        assert client.callback_errors == 0
    assert {len(payload) for payload in inbox.payloads} <= {5, 5_000}


@on_both_loops
async def test_the_buffer_is_bounded_while_the_server_reads_nothing(own_server, fast):
    pending = 262_144
    inbox = Inbox()
    async with (
        connected(own_server.url, fast=fast, pending_size=pending, flush_timeout=0.05) as client,
        connected(own_server.url, fast=fast) as receiver,
    ):
        receiver.subscribe_sync("flood", inbox)
        await receiver.flush()
        pause(own_server)
        sent, peak = 0, 0
        try:
            with pytest.raises(BusOverrun) as refused:  # noqa: PT012 -- it is the last of many that is refused
                while True:
                    client.publish_nowait("flood", b"x" * 50_000)
                    sent += 1
                    peak = max(peak, client.buffered_bytes)
                    if sent % 3 == 0:
                        await asyncio.sleep(0)  # a tick: what is pending moves to the socket's buffer
            waiting = asyncio.ensure_future(client.drain_if_over())
            await asyncio.sleep(0.02)
            assert not waiting.done()
        finally:
            resume(own_server)
        await waiting
        await inbox.have(sent)
        assert client.buffered_bytes < pending
        client.publish_nowait("flood", b"once more")
        await inbox.have(sent + 1)
    limit = refused.value.limit_bytes
    assert limit == pending * 8
    assert limit <= peak <= limit + 4 * 50_100
    assert all(len(payload) == 50_000 for payload in inbox.payloads[:-1])


@on_both_loops
async def test_a_publisher_that_waits_stays_near_its_bound(nats_url, fast):
    pending, peak = 262_144, 0
    inbox = Inbox()
    async with connected(nats_url, fast=fast, pending_size=pending) as client:
        client.subscribe_sync("steady", inbox)
        for _ in range(400):
            client.publish_nowait("steady", b"x" * 50_000)
            peak = max(peak, client.buffered_bytes)
            await client.drain_if_over()
        await inbox.have(400)
    assert peak <= pending + 2 * 50_100


@on_both_loops
async def test_waiting_for_the_socket_ends_when_the_connection_is_lost(own_server, fast):
    async with connected(own_server.url, fast=fast, pending_size=65_536 * 2) as client:
        pause(own_server)
        try:
            while client.buffered_bytes < 600_000:
                client.publish_nowait("lost", b"x" * 50_000)
                await asyncio.sleep(0)
        except BusOverrun:
            pass
        waiting = asyncio.ensure_future(client.drain_if_over())
        await asyncio.sleep(0.02)
        own_server.kill()
        with pytest.raises(BusDisconnected):
            async with asyncio.timeout(5):
                await waiting


@on_both_loops
async def test_closing_a_lost_connection_with_unsent_messages_raises_nothing(own_server, fast):
    async with connected(own_server.url, fast=fast) as client:
        pause(own_server)
        for _ in range(200):
            client.publish_nowait("unsent", b"x" * 50_000)
            await asyncio.sleep(0)
        client.publish_nowait("unsent", b"of this tick")
        own_server.kill()
        await until(lambda: not client.is_connected)
    assert client.is_closed


@on_both_loops
async def test_a_flush_that_gave_up_does_not_deafen_the_client(own_server, fast):
    inbox = Inbox()
    async with connected(own_server.url, fast=fast) as client:
        client.subscribe_sync("deaf", inbox)
        await client.flush()
        pause(own_server)
        try:
            with pytest.raises(nats.errors.FlushTimeoutError):
                await client.flush(timeout=0.05)
        finally:
            resume(own_server)
        client.publish_nowait("deaf", b"heard")
        await inbox.have(1)
        await client.flush()
        assert client.stats["reconnects"] == 0


@on_both_loops
async def test_request_subscribe_and_jetstream_of_nats_py_work_beside_the_hot_path(nats_url, fast):
    inbox = Inbox()
    async with connected(nats_url, fast=fast) as client:
        client.subscribe_sync(
            "echo", lambda subject, reply, payload, headers: client.publish_nowait(reply, payload[::-1])
        )
        client.subscribe_sync("noise", inbox)
        answers = await asyncio.gather(*(client.request("echo", b"<%d" % n, timeout=5) for n in range(50)))
        assert [answer.data for answer in answers] == [(b"<%d" % n)[::-1] for n in range(50)]
        with pytest.raises(nats.errors.NoRespondersError):
            await client.request("nobody", b"", timeout=5)

        js = client.jetstream()
        await js.add_stream(name=f"S-{fast}", subjects=[f"stored.{fast}.*"])
        for number in range(20):
            client.publish_nowait("noise", b"%d" % number)
            ack = await js.publish(f"stored.{fast}.{number}", b"%d" % number, headers={"Nats-Msg-Id": f"m{number}"})
            assert ack.seq == number + 1
        puller = await js.pull_subscribe(f"stored.{fast}.*", durable="d")
        messages = await puller.fetch(20, timeout=5)
        assert [message.data for message in messages] == [b"%d" % number for number in range(20)]
        for message in messages:
            await message.ack()
        with pytest.raises(nats.errors.TimeoutError):
            await puller.fetch(1, timeout=0.1)  # status messages without payload
        await js.delete_stream(f"S-{fast}")
        await inbox.have(20)
        assert inbox.payloads == [b"%d" % number for number in range(20)]


@on_both_loops
async def test_a_stock_subscription_and_a_hot_one_see_the_same_messages(nats_url, fast):
    hot, cold = Inbox(), []
    async with connected(nats_url, fast=fast) as client:

        async def collect(message):
            cold.append(message.data)

        client.subscribe_sync("twice", hot)
        await client.subscribe("twice", cb=collect)
        for number in range(500):
            client.publish_nowait("twice", b"%d" % number * 50)
            if number % 7 == 0:
                await asyncio.sleep(0)
        await until(lambda: len(hot) == len(cold) == 500)
    assert hot.payloads == cold == [b"%d" % number * 50 for number in range(500)]


@on_both_loops
async def test_drain_delivers_what_was_published_and_closes(nats_url, fast):
    inbox = Inbox()
    async with connected(nats_url, fast=fast) as receiver:
        receiver.subscribe_sync("drained", inbox)
        await receiver.flush()
        async with connected(nats_url, fast=fast) as sender:
            echoed = Inbox()
            sender.subscribe_sync("drained", echoed)
            for number in range(200):
                sender.publish_nowait("drained", b"%d" % number)
            await sender.drain()
            assert sender.is_closed
            with pytest.raises(BusDisconnected):
                sender.publish_nowait("drained", b"too late")
        await inbox.have(200)


@on_both_loops
async def test_a_lame_duck_server_is_announced_and_can_be_left(own_server, fast):
    told = asyncio.Event()

    async def lame_duck():
        told.set()

    async with connected(own_server.url, fast=fast, lame_duck_mode_cb=lame_duck):
        os.kill(own_server.pid, signal.SIGUSR2)
        async with asyncio.timeout(5):
            await told.wait()
        own_server.kill()  # or it would take its time to leave


@on_both_loops
async def test_a_server_that_hangs_is_noticed_by_missing_pongs(own_server, fast):
    async with connected(own_server.url, fast=fast, ping_interval=0.05, max_outstanding_pings=2) as client:
        await asyncio.sleep(0.3)
        assert client.stats["reconnects"] == 0, "pongs are seen"
        pause(own_server)
        try:
            await until(lambda: not client.is_connected)
        finally:
            resume(own_server)
        await until(lambda: client.is_connected)


@on_both_loops
async def test_the_pings_of_the_server_are_answered(fast):
    with EmbeddedNats(settings={"ping_interval": '"100ms"', "ping_max": "1"}) as server:
        async with connected(server.url, fast=fast) as client:
            await asyncio.sleep(0.6)
            assert client.stats["reconnects"] == 0
            assert client.is_connected


@pytest.fixture
def certificate(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return tmp_path / "cert.pem"


@on_both_loops
async def test_tls_works_with_big_and_small_messages(certificate, fast):
    inbox = Inbox()
    tls_block = f'{{cert_file: "{certificate}", key_file: "{certificate.with_name("key.pem")}"}}'
    with EmbeddedNats(settings={"tls": tls_block}) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        async with connected(server.url, fast=fast, tls=context, tls_hostname="127.0.0.1") as client:
            client.subscribe_sync("secret", inbox)
            for size in (3, 1_000_000, 0, 70_000):
                client.publish_nowait("secret", b"s" * size)
            await inbox.have(4)
            await client.force_reconnect()
            await until(lambda: client.is_connected and client.stats["reconnects"] == 1)
            client.publish_nowait("secret", b"again")
            await inbox.have(5)
    assert [len(payload) for payload in inbox.payloads] == [3, 1_000_000, 0, 70_000, 5]


@on_both_loops
async def test_a_websocket_url_is_refused_with_the_way_out(fast):
    if fast:
        with pytest.raises(ValueError, match="fast=False"):
            await make_client(fast).connect("ws://127.0.0.1:1")


@on_both_loops
async def test_a_server_that_is_not_there_is_a_named_error(fast):
    client = make_client(fast)
    with pytest.raises((nats.errors.NoServersError, OSError)):
        await client.connect("nats://127.0.0.1:1", **{**FAST_RECONNECT, "max_reconnect_attempts": 1}, error_cb=ignore)
