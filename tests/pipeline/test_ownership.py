"""One owner process on a real broker. Publisher, lookup and engines are played on the bus, message by message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pipeline import blob
from pipeline.bus import Bus
from pipeline.events import (
    Accepted,
    Beacon,
    Cancelled,
    Envelope,
    Find,
    Found,
    KVTransferred,
    Outcome,
    Plan,
    PrefillNoted,
    PromptEncoded,
    Span,
    StageFailed,
    Struct,
)
from pipeline.jetstream import ensure
from pipeline.membership import Membership
from pipeline.owner import Action
from pipeline.ownership import _CARRY_OUT, Ownership
from pipeline.topology import Topology
from pipeline.wire import AckKind, decode_acks, decode_prompt, encode
from tests.pipeline.fabric import (
    GIVE_UP_S,
    LENGTH,
    Counted,
    Ear,
    EchoCodec,
    Reader,
    eventually,
    frame_of,
    joined,
    limited,
    new_rid,
    new_worker,
)
from tidemill.nats_server import EmbeddedNats

# Nobody is in a hurry: what a test waits for is said by somebody. Holders send no beacons, but answer pings.
CALM = {
    "accept_timeout_s": 60.0,
    "beacon_fresh_s": 3600.0,
    "holder_silent_s": 3600.0,
    "ack_tokens_s": 0.005,
    "drain_s": 0.05,
    "retry_pause_s": 0.01,
}
PLAN = Plan(prompt_tokens=2, hit_tokens=1, compute_from=1, replay_from=0, seed=1)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


class Owning:
    """A running owner process."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.codec = EchoCodec()
        self.membership = Membership(bus)
        self.ownership = Ownership(bus, self.membership, self.codec, epoch=3)
        self.stop = asyncio.Event()
        self.running = asyncio.ensure_future(self.ownership.run(self.stop))

    async def end(self) -> None:
        self.stop.set()
        await self.running


class World:
    """Everything around an owner: a publisher, a lookup worker and two engines, all on one bus."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.lookup, self.prefill, self.decode = (new_worker(role) for role in ("lookup", "prefill", "decode"))
        self.ears = {name: Ear.of_worker(bus, name) for name in (self.lookup, self.prefill, self.decode)}
        for name in self.ears:
            Ear(bus, bus.topology.subject("ping", worker=name), reply_with=b"")
        self.everyone = Ear(bus, bus.topology.subject("everyone"))
        self.acks = Ear(bus, bus.topology.subject("acks", worker=self.decode))
        self.prompts = Ear(bus, bus.topology.subject("encoded"), control=False)

    # --- the publisher

    async def publish(self, body: Any = None, *, raw: bytes | None = None, rid: str = "", **headers: str) -> Reader:
        rid = rid or new_rid()
        reader = Reader(self.bus)
        reader.rid = rid
        given = {"Nats-Msg-Id": f"default:{rid}", "Tm-Reply": reader.reply}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = json.dumps(body or {}).encode() if raw is None else raw
        answer = await self.bus.data.request("v1.in.batch.default", data, timeout=5.0, headers=given)
        assert "error" not in json.loads(answer.data)
        return reader

    async def cancel(self, payload: bytes, tenant: str = "default", reply: str = "") -> None:
        self.bus.tell(self.bus.topology.subject("cancel", tenant=tenant), payload, reply)
        await self.bus.flush()

    async def stored(self) -> int:
        info = await self.bus.ask_json("$JS.API.STREAM.INFO.INTAKE", {})
        return int(info["state"]["messages"])

    async def taken_off(self) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            while await self.stored():  # noqa: ASYNC110 - the broker has no event
                await asyncio.sleep(0.002)

    # --- the stages

    async def prompt(self, number: int = 1) -> PromptEncoded:
        """The `number`-th that lookup's queue group got."""
        await eventually(lambda: len(self.prompts.payloads) >= number, f"prompt {number}")
        return decode_prompt(self.prompts.payloads[number - 1])

    def say(self, owner: str, message: Struct) -> None:
        self.bus.tell(self.bus.topology.subject("control", worker=owner), encode(message))

    def accept(self, env: Envelope, stage: str, worker: str, outcome: Outcome = Outcome.ACCEPTED, **more: Any) -> None:
        self.say(env.owner, Accepted(env.rid, env.attempt, stage, worker, 1, outcome, env.owner, **more))

    def tokens(self, env: Envelope, position: int, *tokens: int, finish: int = 0, choice: int = 0) -> None:
        subject = self.bus.topology.subject("tokens", worker=env.owner)
        frame = frame_of(env.handles[choice], position, tokens, finish)
        self.bus.publish(subject, frame, self.bus.topology.subject("acks", worker=self.decode))

    def to_decode(self, env: Envelope) -> None:
        """Every stage up to decode says its word."""
        self.accept(env, "lookup", self.lookup)
        self.accept(env, "prefill", self.prefill, plan=PLAN)
        span = Span("prefill", self.prefill, 1, 2)
        self.say(env.owner, PrefillNoted(env.rid, env.attempt, PLAN, self.decode, (span,), self.prefill, 1))
        self.say(env.owner, KVTransferred(env.rid, env.attempt, self.decode, 1, 0, 0, 0, (), PLAN))

    async def serve(self, number: int = 1) -> Envelope:
        """Play one request to its end: two tokens."""
        env = (await self.prompt(number)).env
        self.to_decode(env)
        self.tokens(env, 0, 5, 6, finish=LENGTH)
        return env


@asynccontextmanager
async def owning(url: str, **limits: Any) -> AsyncIterator[tuple[Owning, World]]:
    topology: Topology = limited(**{**CALM, **limits})
    async with joined(url) as outside, joined(url, new_worker("codec"), topology) as bus:
        await ensure(bus)
        await bus.ask_json("$JS.API.STREAM.PURGE.INTAKE", {})
        world, owner = World(outside), Owning(bus)
        for each in (outside, bus):
            await each.flush()
        yield owner, world
        await owner.end()


@asynccontextmanager
async def second_owner(url: str, **limits: Any) -> AsyncIterator[Owning]:
    async with joined(url, new_worker("codec"), limited(**{**CALM, **limits})) as bus:
        owner = Owning(bus)
        await bus.flush()
        yield owner
        await owner.end()


async def state(owner: Owning, reader: Reader, wanted: str) -> None:
    """Wait until the owner's machine of a reader's request is in a state."""
    await eventually(lambda: str(owner.ownership.requests[reader.rid].machine.state) == wanted, wanted)


async def test_a_request_goes_all_the_way_and_leaves_nothing_behind(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        reader = await world.publish({"ids": [8, 9]})
        await eventually(lambda: reader.notes == ["request_accepted"])  # no event is out yet
        env = await world.serve()
        await eventually(lambda: reader.ends == ["length"])
        assert reader.numbers() == [0, 1, 2]
        assert [m["event"] for m in reader.events] == [
            {"token": 5}, {"token": 6}, {"reason": "length", "hit": 1, "tokens": 2},
        ]  # fmt: skip
        assert reader.want_subjects == {world.bus.topology.subject("want", worker=owner.bus.worker)}
        await world.taken_off()
        await eventually(lambda: not owner.ownership.requests)
        assert env.rid in owner.ownership.ended
        assert len(owner.ownership.streams) == 0
        await eventually(lambda: any(decode_acks(p)[0] is AckKind.FORGET for p in world.acks.payloads))


async def test_many_requests_at_once_do_not_mix(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        readers = [await world.publish() for _ in range(30)]
        for number in range(30):
            env = (await world.prompt(number + 1)).env
            world.to_decode(env)
            world.tokens(env, 0, int(env.rid[:6], 16), finish=LENGTH)
        await eventually(lambda: all(reader.ends == ["length"] for reader in readers))
        for reader in readers:
            assert reader.events[0]["event"] == {"token": int(reader.rid[:6], 16)}
        await eventually(lambda: not owner.ownership.requests)


async def test_a_bad_body_and_a_bug_of_the_codec_each_end_one_request_by_name(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        bad, bug = await world.publish(raw=b"{"), await world.publish({"raise": "bug"})
        await eventually(lambda: bad.ends == ["invalid_request"] and bug.ends == ["internal"])
        assert bad.events[0]["event"]["error"]["param"] == "body"
        assert bug.events[0]["event"]["error"]["message"] == "the codec stage failed"
        good = await world.publish()
        await world.serve()
        await eventually(lambda: good.ends == ["length"])
        await world.taken_off()


async def test_a_prompt_that_does_not_fit_ends_with_its_finish_reason(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        reader = await world.publish({"too_long": True})
        await eventually(lambda: reader.ends == ["prompt_length_exceeded"])
        assert world.prompts.payloads == []
        await world.taken_off()


async def test_a_codec_that_is_not_ready_is_asked_again(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        owner.codec.ready = False
        reader = await world.publish()
        await eventually(lambda: len(owner.codec.bodies) >= 3)
        owner.codec.ready = True
        await world.serve()
        await eventually(lambda: reader.ends == ["length"])


async def test_a_request_that_no_stage_answers_is_offered_again_and_waits(server: EmbeddedNats):
    async with owning(server.url, accept_timeout_s=0.01, accept_tries=2) as (_owner, world):
        reader = await world.publish()
        await world.serve(5)
        await eventually(lambda: reader.ends == ["length"])


async def test_a_deadline_ends_a_request_by_the_stage_that_had_it(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        reader = await world.publish(Tm_Timeout="0.3")
        env = (await world.prompt()).env
        world.accept(env, "lookup", world.lookup)
        world.accept(env, "prefill", world.prefill)
        await eventually(lambda: reader.ends == ["deadline_exceeded"])
        assert "in prefill" in reader.events[0]["event"]["error"]["message"]
        tombstone = await world.everyone.first(Cancelled)
        assert (tombstone.rid, tombstone.attempt) == (env.rid, 0)
        await world.taken_off()


async def test_a_request_that_is_late_on_arrival_costs_nothing(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        reader = await world.publish(Tm_Timeout="0.000001")
        await eventually(lambda: reader.ends == ["deadline_exceeded"])
        assert owner.codec.bodies == []


async def test_large_ids_travel_by_reference_and_are_purged_at_the_end(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        reader = await world.publish({"ids": [1, 2], "repeat": 20_000})
        event = await world.prompt()
        ref = blob.BlobRef.parse(event.ids_ref)
        assert event.ids == b""
        assert len(await blob.get(world.bus, "default", event.env.rid, ref, 1 << 20)) == 160_000
        await world.serve()
        await eventually(lambda: reader.ends == ["length"])
        async with asyncio.timeout(GIVE_UP_S):
            while (await world.bus.ask_json("$JS.API.STREAM.INFO.BLOB", {}))["state"]["messages"]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def test_a_cancel_is_answered_and_ends_the_request_with_abort(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        reader = await world.publish()
        env = (await world.prompt()).env
        world.to_decode(env)
        world.tokens(env, 0, 5)
        await eventually(lambda: reader.numbers() == [0])
        answer = await world.bus.ask("v1.cancel.default", json.dumps({"rid": env.rid}).encode())
        assert json.loads(answer) == {"type": "cancelled", "rid": env.rid}
        await eventually(lambda: reader.ends == ["abort"])
        assert reader.events[-1]["event"] == {"reason": "abort", "hit": 1, "tokens": 1}
        assert (await world.everyone.first(Cancelled)).rid == env.rid
        await world.taken_off()


async def test_only_the_tenant_may_cancel(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        strangers = Counted("cancels_of_other_tenants")
        reader = await world.publish()
        env = (await world.prompt()).env
        await world.cancel(json.dumps({"rid": env.rid}).encode(), tenant="stranger")
        await eventually(lambda: strangers() == 1)
        await world.serve()
        await eventually(lambda: reader.ends == ["length"])


async def test_a_cancel_may_overtake_its_request_but_not_a_strangers(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        mine, other = new_rid(), new_rid()
        await world.cancel(json.dumps({"rid": mine}).encode())
        await world.cancel(json.dumps({"rid": other}).encode(), tenant="stranger")
        await eventually(lambda: len(owner.ownership._cancelled) == 2)
        cancelled, kept = await world.publish(rid=mine), await world.publish(rid=other)
        await eventually(lambda: cancelled.ends == ["abort"])
        await world.serve()
        await eventually(lambda: kept.ends == ["length"])
        assert len(owner.codec.bodies) == 1


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"7", b'"x"', b"{}", b"\xff", b"null"])
async def test_a_malformed_cancel_is_counted(server: EmbeddedNats, payload: bytes):
    async with owning(server.url) as (owner, world):
        malformed = Counted("cancels_malformed")
        await world.cancel(payload)
        await eventually(lambda: malformed() == 1)
        assert owner.ownership._cancelled == {}
        assert owner.bus.control.callback_errors == 0


async def test_rubbish_from_the_middle_is_counted_and_harms_nothing(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        controls, frames = Counted("control_malformed"), Counted("frames_malformed")
        for payload in (b"", b"\xc1", b"{}"):
            world.bus.tell(world.bus.topology.subject("control", worker=owner.bus.worker), payload)
            world.bus.publish(world.bus.topology.subject("tokens", worker=owner.bus.worker), payload)
        await eventually(lambda: controls() == frames() == 3)
        reader = await world.publish()
        await world.serve()
        await eventually(lambda: reader.ends == ["length"])


async def test_a_failure_that_another_attempt_may_mend_gets_one_with_new_handles(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        reader = await world.publish()
        first = (await world.prompt()).env
        world.to_decode(first)
        world.tokens(first, 0, 5, 6)
        await eventually(lambda: reader.numbers() == [0, 1])
        failed = StageFailed(first.rid, first.attempt, "decode", world.decode, 1, "internal", "a bug", transient=True)
        world.say(first.owner, failed)
        second = (await world.prompt(2)).env
        assert second.attempt > first.attempt == 0
        assert second.handles != first.handles
        assert len(owner.ownership.streams) == 1  # the first handle is free again
        assert (second.plan, second.forced_tokens, second.seed) == (PLAN, 2, first.seed)
        assert (await world.ears[world.decode].first(Cancelled)).attempt == 0
        unknown = Counted("frames_unknown_handle")
        world.tokens(first, 2, 99)  # of the attempt that was given up
        await eventually(lambda: unknown() == 1)
        world.to_decode(second)
        world.tokens(second, 0, 5, 6, 7, finish=LENGTH)
        await eventually(lambda: reader.ends == ["length"])
        assert reader.numbers() == [0, 1, 2, 3]  # what was delivered is not delivered again
        assert {m["a"] for m in reader.events[2:]} == {second.attempt}
        await world.taken_off()


async def test_a_second_attempt_that_contradicts_the_first_ends_stream_lost(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        reader = await world.publish()
        first = (await world.prompt()).env
        world.to_decode(first)
        world.tokens(first, 0, 5, 6)
        world.say(first.owner, StageFailed(first.rid, 0, "decode", world.decode, 1, "internal", "x", transient=True))
        second = (await world.prompt(2)).env
        world.to_decode(second)
        world.tokens(second, 0, 5, 7)
        await eventually(lambda: reader.ends == ["stream_lost"])
        await world.taken_off()


async def test_a_failure_for_good_ends_the_request_under_its_name(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        reader = await world.publish()
        env = (await world.prompt()).env
        failed = StageFailed(env.rid, 0, "lookup", world.lookup, 1, "model_not_found", "no such model", transient=False)
        world.say(env.owner, failed)
        await eventually(lambda: reader.ends == ["model_not_found"])


async def test_a_stop_string_stops_the_engine_at_its_position(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        reader = await world.publish({"stop_at": 7})
        env = (await world.prompt()).env
        world.to_decode(env)
        await state(owner, reader, "decode")
        world.tokens(env, 0, 5, 6, 7, 8)
        await eventually(lambda: reader.ends == ["stop"])
        stopped = await world.ears[world.decode].first(Cancelled)
        assert (stopped.rid, stopped.choice, stopped.position) == (env.rid, 0, 3)
        assert reader.numbers() == [0, 1, 2, 3]


async def test_every_choice_has_its_own_stream(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        reader = await world.publish({"n": 2})
        env = (await world.prompt()).env
        assert len(set(env.handles)) == 2
        world.to_decode(env)
        world.tokens(env, 0, 5, finish=LENGTH)
        world.tokens(env, 0, 6, 7, choice=1)
        await eventually(lambda: reader.ends == ["length"])
        assert await world.stored() == 1
        world.tokens(env, 2, 8, choice=1, finish=LENGTH)
        await eventually(lambda: reader.ends == ["length", "length"])
        assert (reader.numbers(0), reader.numbers(1)) == ([0, 1], [0, 1, 2, 3])
        await world.taken_off()


async def test_an_unknown_handle_is_told_to_its_engine(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        subject = world.bus.topology.subject("tokens", worker=owner.bus.worker)
        world.bus.publish(subject, frame_of(0xDEAD, 0, (1,)), world.bus.topology.subject("acks", worker=world.decode))
        await eventually(lambda: world.acks.payloads)
        kind, handles, _ = decode_acks(world.acks.payloads[0])
        assert (kind, list(handles)) == (AckKind.FORGET, [0xDEAD])
        assert world.acks.replies == [owner.bus.worker]


async def test_positions_are_acknowledged_and_gaps_asked_for(server: EmbeddedNats):
    async with owning(server.url) as (_owner, world):
        reader = await world.publish()
        env = (await world.prompt()).env
        world.to_decode(env)
        world.tokens(env, 0, 5)
        world.tokens(env, 2, 7)
        await eventually(lambda: any(decode_acks(p)[0] is AckKind.RESEND for p in world.acks.payloads))
        kind, handles, positions = decode_acks(world.acks.payloads[-1])
        assert (kind, list(handles), list(positions)) == (AckKind.RESEND, [env.handles[0]], [1])
        world.tokens(env, 1, 6)
        await eventually(lambda: reader.numbers() == [0, 1, 2])
        have = (AckKind.HAVE, 3)
        await eventually(lambda: have in {(decode_acks(p)[0], decode_acks(p)[2][0]) for p in world.acks.payloads})


async def test_work_that_was_taken_after_its_end_is_cancelled(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        late, rid = Counted("accepts_of_ended_requests"), new_rid()
        for owned_by, stage, outcome in (
            ("another", "prefill", Outcome.ACCEPTED),
            (owner.bus.worker, "lookup", Outcome.ACCEPTED),
            (owner.bus.worker, "prefill", Outcome.BUSY),
            (owner.bus.worker, "prefill", Outcome.QUEUED),
        ):
            world.say(owner.bus.worker, Accepted(rid, 2, stage, world.prefill, 1, outcome, owned_by))
        tombstone = await world.ears[world.prefill].first(Cancelled)
        assert (tombstone.rid, tombstone.attempt) == (rid, 2)
        assert late() == 1


async def test_a_find_is_answered_by_the_owner_and_by_nobody_else(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        reader = await world.publish()
        await world.prompt()
        everyone = world.bus.topology.subject("everyone")
        for rid in (new_rid(), reader.rid):
            world.bus.tell(everyone, encode(Find(rid, world.lookup)))
        found = await world.ears[world.lookup].first(Found)
        assert (found.rid, found.worker, found.epoch, found.stage) == (reader.rid, owner.bus.worker, 3, "owner")
        await world.serve()
        await eventually(lambda: reader.ends)


async def test_a_delivery_that_repeats_leaves_the_request_where_it_is(server: EmbeddedNats):
    async with owning(server.url) as (owner, world), second_owner(server.url) as other:
        reader = await world.publish()
        env = (await world.prompt()).env
        world.bus.publish(env.intake_ack, b"-NAK")
        either = (owner.ownership, other.ownership)
        await eventually(
            lambda: (
                any(".2." in o.requests[env.rid].delivery.ack for o in either if env.rid in o.requests)
                or any(isinstance(m, Find) for m in world.everyone.controls)
            )
        )
        await eventually(lambda: sum(env.rid in o.requests for o in either) == 1, "one owner")
        assert len(world.prompts.payloads) == 1
        world.to_decode(env)
        world.tokens(env, 0, 5, finish=LENGTH)
        await eventually(lambda: reader.ends == ["length"])
        await world.taken_off()


async def test_a_delivery_that_repeats_after_the_end_is_acknowledged_again(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        reader = await world.publish()
        await world.serve()
        await eventually(lambda: reader.ends)
        await world.taken_off()
        # a new stream has not seen this Msg-Id: the same message comes again
        await world.bus.ask_json("$JS.API.STREAM.DELETE.INTAKE", {})
        await ensure(owner.bus)
        again = await world.publish(rid=reader.rid)
        await world.taken_off()
        assert again.messages == []
        assert len(world.prompts.payloads) == 1
        assert owner.ownership.requests == {}


async def test_the_request_of_a_dead_owner_starts_over_under_a_fencing_number(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        reader = await world.publish()
        first = (await world.prompt()).env
        # it dies without a word: its connections close while everything is in hand
        await owner.bus.close()
        async with second_owner(server.url) as other:
            world.bus.publish(first.intake_ack, b"-NAK")  # as a holder does, or ack_wait in the end
            second = (await world.prompt(2)).env
            assert second.owner == other.bus.worker
            assert second.attempt > 0
            assert any(isinstance(m, Find) and m.asker == other.bus.worker for m in world.everyone.controls)
            assert (await world.everyone.first(Cancelled)).attempt == second.attempt - 1
            world.to_decode(second)
            world.tokens(second, 0, 5, finish=LENGTH)
            await eventually(lambda: reader.ends == ["length"])
            await world.taken_off()
        owner.ownership.requests.clear()


async def test_an_owner_that_stops_gives_back_what_it_could_not_finish(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        given_back = Counted("requests_given_back")
        reader = await world.publish()
        acks = Ear(world.bus, (await world.prompt()).env.intake_ack, control=False)
        await world.bus.flush()
        await owner.end()
        assert given_back() == 1
        await eventually(lambda: b"-NAK" in acks.payloads)
        async with second_owner(server.url) as other:
            owner.ownership.requests.clear()  # the process is gone: it answers no Find
            second = (await world.prompt(2)).env
            assert second.owner == other.bus.worker
            world.to_decode(second)
            world.tokens(second, 0, 5, finish=LENGTH)
            await eventually(lambda: reader.ends == ["length"])
            await world.taken_off()


async def test_an_owner_that_stops_finishes_what_it_can_and_takes_nothing_new(server: EmbeddedNats):
    async with owning(server.url, drain_s=60.0) as (owner, world):
        reader = await world.publish()
        env = (await world.prompt()).env
        owner.stop.set()
        await eventually(lambda: all(intake._stopped for intake in owner.ownership._admission._intakes))
        late = await world.publish()
        world.to_decode(env)
        world.tokens(env, 0, 5, finish=LENGTH)
        await eventually(lambda: reader.ends == ["length"])
        await asyncio.wait_for(owner.running, 10)
        assert late.messages == []
        assert await world.stored() == 1


async def test_an_intake_message_is_kept_while_it_is_worked_on(server: EmbeddedNats):
    async with owning(server.url, ack_in_progress_s=0.01) as (owner, world):
        reader = await world.publish()
        env = (await world.prompt()).env
        progress = Ear(world.bus, env.intake_ack, control=False)
        await eventually(lambda: progress.payloads.count(b"+WPI") >= 2)
        await world.serve()
        await eventually(lambda: reader.ends)
        await eventually(lambda: b"+ACK" in progress.payloads)
        assert not owner.ownership.requests


async def test_a_subscriber_that_once_wanted_and_then_kept_silent_is_gone(server: EmbeddedNats):
    async with owning(server.url, want_silence_s=0.1, ack_in_progress_s=0.01) as (owner, world):
        quiet, gone = await world.publish(), Counted("subscribers_silent")
        reader = await world.publish()
        await world.prompt(2)
        want = json.dumps({"rid": reader.rid, "next": 0}).encode()
        world.bus.tell(world.bus.topology.subject("want", worker=owner.bus.worker), want)
        await eventually(lambda: reader.ends == ["abort"])
        assert gone() == 1
        assert quiet.ends == []  # it never sent one: publishing counts as delivery


async def test_a_client_that_wants_is_waited_for_until_it_has_the_end(server: EmbeddedNats):
    async with owning(server.url) as (owner, world):
        reader = await world.publish()
        env = (await world.prompt()).env
        subject = world.bus.topology.subject("want", worker=owner.bus.worker)
        world.bus.tell(subject, json.dumps({"rid": env.rid, "next": 0}).encode())
        await eventually(lambda: owner.ownership.requests[env.rid].want_at >= 0)
        await world.serve()
        await eventually(lambda: reader.ends == ["length"])
        await state(owner, reader, "ending")
        assert await world.stored() == 1
        world.bus.tell(subject, json.dumps({"rid": env.rid, "next": 3}).encode())
        await world.taken_off()


async def beacon(owner: Owning, worker: str, epoch: int) -> None:
    owner.membership.announce(Beacon(worker, epoch, ("prefill",)))
    await eventually(lambda: owner.membership.epoch(worker) == epoch)


async def test_a_holder_that_came_back_as_another_process_costs_an_attempt_and_the_third_the_request(
    server: EmbeddedNats,
):
    """Ending a request from within the holder check must not stop the checks of the others."""
    async with owning(server.url, beacon_s=0.005) as (owner, world):
        failed = Counted("ticks_failed")
        readers = [await world.publish(), await world.publish()]
        for death in range(1, 4):
            for number in (1, 2):
                env = (await world.prompt(2 * (death - 1) + number)).env
                assert (env.attempt > 0) is (death > 1)
                world.say(env.owner, Accepted(env.rid, env.attempt, "prefill", world.prefill, death, Outcome.ACCEPTED))
            for reader in readers:
                await state(owner, reader, "prefill")
            await beacon(owner, world.prefill, death + 1)
        await eventually(lambda: all(reader.ends == ["worker_lost"] for reader in readers))
        assert failed() == 0
        await world.taken_off()


async def test_a_tick_that_fails_is_counted_and_ticks_on(server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []

    def failing(_self: Ownership) -> None:
        calls.append(1)
        raise ZeroDivisionError

    monkeypatch.setattr(Ownership, "_tick_holders", failing)
    async with owning(server.url, beacon_s=0.005) as (_owner, world):
        failed = Counted("ticks_failed")
        await eventually(lambda: len(calls) >= 3)
        assert failed() >= 2
        reader = await world.publish()
        await world.serve()
        await eventually(lambda: reader.ends == ["length"])


async def test_progress_is_told_while_nothing_else_is(server: EmbeddedNats):
    async with owning(server.url, progress_s=0.01) as (_owner, world):
        reader = await world.publish()
        await eventually(lambda: reader.notes.count("request_progress") >= 2)
        assert next(m["event"]["stage"] for m in reader.messages if m["event"].get("type") == "request_progress")
        env = (await world.prompt()).env
        world.to_decode(env)
        world.tokens(env, 0, 5)
        await eventually(lambda: reader.numbers() == [0])
        told = len(reader.notes)
        world.tokens(env, 1, 6, finish=LENGTH)
        await eventually(lambda: reader.ends)
        assert len(reader.notes) == told  # tokens are progress enough


async def test_a_broker_restart_in_the_middle_costs_no_event():
    with EmbeddedNats() as own:
        async with owning(own.url) as (owner, world):
            reader = await world.publish()
            env = (await world.prompt()).env
            world.to_decode(env)
            world.tokens(env, 0, 5)
            await eventually(lambda: reader.numbers() == [0])
            own.kill()
            await eventually(lambda: not owner.bus.data.is_connected)
            await asyncio.to_thread(own.start)
            connections = (owner.bus.data, owner.bus.control, world.bus.data, world.bus.control)
            await eventually(lambda: all(client.is_connected for client in connections))
            for bus in (world.bus, owner.bus):
                await bus.flush()  # every subscription is back
            async with asyncio.timeout(GIVE_UP_S):
                while not reader.ends:  # as an engine's outbox does
                    world.tokens(env, 1, 6, finish=LENGTH)
                    await asyncio.sleep(0.02)
            assert reader.numbers() == [0, 1, 2]


def test_every_action_of_the_machine_has_a_hand():
    assert set(_CARRY_OUT) == set(Action.__args__)
