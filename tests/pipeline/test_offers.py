"""One candidate after the other, with real receivers that accept, are busy, keep silent or come late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pipeline.bus import Bus
from pipeline.events import Accepted, Envelope, Outcome
from pipeline.offers import Offers, first_taker
from pipeline.topology import Topology
from pipeline.wire import decode_control, decode_matched, encode
from tests.pipeline.fabric import Counted, accepted, envelope, eventually, joined, limited, matched, new_rid, new_worker

PATIENT = limited(accept_timeout_s=60.0)  # whoever is to answer does
QUICK = limited(accept_timeout_s=0.03)  # whoever is silent is silent


class Sender:
    """The sending side: feeds every answer to its offers."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.env: Envelope = envelope(bus.worker)
        self.key = (self.env.rid, self.env.attempt, "prefill")
        self.offers = Offers(bus)
        bus.subscribe(bus.topology.subject("control", worker=bus.worker), self._control, control=True)

    def _control(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        message = decode_control(payload)
        assert isinstance(message, Accepted)
        self.offers.answered(message)

    def offer_for(self, engine: str) -> tuple[str, bytes]:
        subject = self.bus.topology.subject("matched", worker=engine)
        return subject, encode(matched(self.env, engine, self.bus.worker))


class Receiver:
    """An engine with one answer to everything; None = silence."""

    def __init__(self, bus: Bus, answer: Outcome | None, name: str = "") -> None:
        self.name = name or new_worker("engine")
        self.num_offers = 0
        self._bus = bus
        self._answer = answer
        self.late: list[Callable[[], bool]] = []
        bus.subscribe(bus.topology.subject("matched", worker=self.name), self._offered)

    def _offered(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        self.num_offers += 1
        event = decode_matched(payload)
        outcome = self._answer or Outcome.ACCEPTED
        message = encode(accepted(event.prompt.env, self.name, outcome))
        subject = self._bus.topology.subject("control", worker=event.sender)
        if self._answer is None:
            self.late.append(lambda: self._bus.tell(subject, message))
        else:
            self._bus.tell(subject, message)


async def offered(
    url: str, *answers: Outcome | None, topology: Topology = PATIENT
) -> tuple[Accepted | None, list[Receiver]]:
    """Offer to receivers with these answers, in order."""
    async with joined(url, topology=topology) as bus, joined(url) as far:
        receivers = [Receiver(far, answer) for answer in answers]
        sender = Sender(bus)
        await far.flush()
        await bus.flush()
        answer = await first_taker(sender.offers, sender.key, [sender.offer_for(r.name) for r in receivers])
        assert sender.offers._open == {}
        return answer, receivers


async def test_the_first_that_accepts_has_it(nats_url: str):
    for outcome in (Outcome.ACCEPTED, Outcome.QUEUED, Outcome.DUPLICATE):
        answer, receivers = await offered(nats_url, outcome, Outcome.ACCEPTED)
        assert answer is not None
        assert (answer.outcome, answer.worker) == (outcome, receivers[0].name)
        assert [r.num_offers for r in receivers] == [1, 0]


async def test_after_a_busy_one_the_next_is_asked(nats_url: str):
    answer, receivers = await offered(nats_url, Outcome.BUSY, Outcome.BUSY, Outcome.ACCEPTED, Outcome.ACCEPTED)
    assert answer is not None
    assert answer.worker == receivers[2].name
    assert [r.num_offers for r in receivers] == [1, 1, 1, 0]


async def test_after_a_silent_one_the_next_is_asked(nats_url: str):
    unanswered = Counted("offers_unanswered")
    answer, receivers = await offered(nats_url, None, Outcome.ACCEPTED, topology=limited(accept_timeout_s=0.25))
    assert answer is not None
    assert answer.worker == receivers[1].name
    assert unanswered() == 1


async def test_a_candidate_that_does_not_exist_is_a_silent_one(nats_url: str):
    async with joined(nats_url, topology=QUICK) as bus:
        sender = Sender(bus)
        assert await first_taker(sender.offers, sender.key, [sender.offer_for(new_worker())]) is None


async def test_dead_and_refused_settle_it(nats_url: str):
    for outcome in (Outcome.DEAD, Outcome.REFUSED):
        answer, receivers = await offered(nats_url, outcome, Outcome.ACCEPTED)
        assert answer is not None
        assert answer.outcome is outcome
        assert [r.num_offers for r in receivers] == [1, 0]


async def test_nobody_took_it_when_all_were_busy_or_there_was_none(nats_url: str):
    answer, receivers = await offered(nats_url, Outcome.BUSY, Outcome.BUSY)
    assert answer is None
    assert [r.num_offers for r in receivers] == [1, 1]
    assert await offered(nats_url) == (None, [])


async def test_candidates_are_made_one_at_a_time(nats_url: str):
    async with joined(nats_url, topology=PATIENT) as bus:
        made: list[str] = []
        sender = Sender(bus)
        receivers = [Receiver(bus, answer) for answer in (Outcome.BUSY, Outcome.ACCEPTED, Outcome.ACCEPTED)]
        await bus.flush()

        async def candidates() -> AsyncIterator[tuple[str, bytes]]:
            for receiver in receivers:
                made.append(receiver.name)
                yield sender.offer_for(receiver.name)

        answer = await first_taker(sender.offers, sender.key, candidates())
        assert answer is not None
        assert made == [receivers[0].name, receivers[1].name]


async def test_an_accept_that_comes_too_late_is_harmless(nats_url: str):
    async with joined(nats_url, topology=QUICK) as bus:
        sender, late = Sender(bus), Receiver(bus, None)
        await bus.flush()
        assert await first_taker(sender.offers, sender.key, [sender.offer_for(late.name)]) is None
        await eventually(lambda: late.late)
        late.late[0]()
        await bus.flush()
        assert sender.offers._open == {}
        assert bus.control.callback_errors == 0


async def test_answers_to_other_requests_attempts_and_stages_are_not_ours(nats_url: str):
    async with joined(nats_url, topology=PATIENT) as bus:
        sender, env = Sender(bus), envelope(bus.worker)
        sending = asyncio.ensure_future(sender.offers.send(sender.key, *sender.offer_for(new_worker())))
        await eventually(lambda: sender.offers._open)
        mine = envelope(bus.worker, sender.env.rid, attempt=3)
        for other in (
            accepted(env, "w", Outcome.ACCEPTED),
            accepted(mine, "w", Outcome.ACCEPTED),
            accepted(sender.env, "w", Outcome.ACCEPTED, stage="decode"),
        ):
            sender.offers.answered(other)
        assert not sending.done()
        right = accepted(sender.env, "w", Outcome.QUEUED)
        sender.offers.answered(right)
        sender.offers.answered(accepted(sender.env, "w", Outcome.BUSY))  # a second answer changes nothing
        assert await sending is right


async def test_many_offers_at_once_each_get_their_own_answer(nats_url: str):
    async with joined(nats_url, topology=PATIENT) as bus, joined(nats_url) as far:
        sender = Sender(bus)
        yes, no = Receiver(far, Outcome.ACCEPTED), Receiver(far, Outcome.BUSY)
        await far.flush()
        await bus.flush()

        async def one(receiver: Receiver) -> str | None:
            env = envelope(bus.worker, new_rid())
            payload = encode(matched(env, receiver.name, bus.worker))
            subject = bus.topology.subject("matched", worker=receiver.name)
            answer = await first_taker(sender.offers, (env.rid, 0, "prefill"), [(subject, payload)])
            return answer.worker if answer else None

        got = await asyncio.gather(*(one((yes, no)[index % 2]) for index in range(100)))
        assert got == [yes.name, None] * 50
