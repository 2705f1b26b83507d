"""lookup: the longest stored prefix and the engine to compute the rest. Its answer is a hint, not a lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import structlog

from kv.index import PrefixIndex
from pipeline.bus import Bus
from pipeline.errors import TransientError
from pipeline.events import Beacon, IndexChanged, PrefixMatched, PromptEncoded
from pipeline.membership import FORGET_S, Membership
from pipeline.metrics import count
from stages.assigned import Assigned
from stages.balance import BLOCK_TOKENS, rank_prefill

log = structlog.get_logger()

Position = tuple[int, int]  # epoch, number of the last event


class Lookup:
    """Request stage: PromptEncoded in; PrefixMatched out, one alternative per engine, best first."""

    def __init__(self, membership: Membership, index: PrefixIndex) -> None:
        self._membership = membership
        self._index = index
        self._assigned = Assigned()

    async def handle(self, event: PromptEncoded) -> AsyncGenerator[PrefixMatched]:
        """Yield engines in order of preference; none when no fresh one serves the model."""
        hits = self._index.match(event.block_keys)
        beacons = self._membership.fresh("prefill")
        ranked = rank_prefill(
            beacons, hits, event.num_prompt_tokens, self._assigned.expire(), fingerprint=event.fingerprint
        )
        for beacon in ranked:
            hit_tokens = BLOCK_TOKENS * hits.get(beacon.worker, 0)
            self._assigned.add(beacon.worker, max(event.num_prompt_tokens - hit_tokens, 1))
            yield PrefixMatched(prompt=event, expected_hit_tokens=hit_tokens, engine=beacon.worker, sender="")


class IndexFeed:
    """Keeps a lookup worker's index in step with the prefill engines: events, gaps, new and lost holders."""

    def __init__(self, bus: Bus, membership: Membership, index: PrefixIndex) -> None:
        self._bus = bus
        self._membership = membership
        self._index = index
        self._decode = msgspec.msgpack.Decoder(IndexChanged).decode
        self._known: dict[str, Position] = {}  # how far the index is, by holder
        self._behind: dict[str, Position] = {}  # what a beacon said when the index was not there yet
        self._syncs: dict[str, asyncio.Task[None]] = {}
        bus.subscribe(bus.topology.pattern("index"), self._changed, control=True)
        membership.on_change.append(self._heard)

    def _changed(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        try:
            change = self._decode(payload)
            apply = self._index.stored if change.stored else self._index.removed
            apply(change.holder, change.epoch, change.seq, change.stored or change.removed)
        except (msgspec.DecodeError, ValueError):
            count("index_events_malformed")
            return
        self._known[change.holder] = max((change.epoch, change.seq), self._known.get(change.holder, (0, 0)))
        for holder in self._index.drain_wanted():
            self._sync(holder)

    def _heard(self, beacon: Beacon) -> None:
        """A beacon says how far its holder's events go: who is still behind the beacon before, has lost some."""
        if "prefill" not in beacon.roles:
            return
        known = self._known.get(beacon.worker)
        told = (beacon.epoch, beacon.index_seq)
        if known is None or known < self._behind.get(beacon.worker, (0, 0)):
            self._sync(beacon.worker)
        if known is not None and known < told:
            self._behind[beacon.worker] = told
        else:
            self._behind.pop(beacon.worker, None)
        self._forget_lost()

    def _forget_lost(self) -> None:
        for holder in [holder for holder in self._index.holders if self._membership.silent_s(holder) > FORGET_S]:
            self._index.forget(holder)
            self._known.pop(holder, None)
        self._index.sweep()

    def _sync(self, holder: str) -> None:
        if holder not in self._syncs:
            task = asyncio.get_running_loop().create_task(self._ask(holder))
            self._syncs[holder] = task
            task.add_done_callback(lambda _done: self._syncs.pop(holder, None))

    async def _ask(self, holder: str) -> None:
        subject = self._bus.topology.subject("index_sync", worker=holder)
        try:
            snapshot = self._decode(await self._bus.ask(subject, b"", 2.0))
            self._index.snapshot(snapshot.holder, snapshot.epoch, snapshot.seq, snapshot.stored)
        except (TransientError, msgspec.DecodeError, ValueError) as error:
            # the next beacon asks again
            count("index_syncs_failed")
            log.debug("index not synchronised", holder=holder, error=str(error))
            return
        self._known[holder] = max((snapshot.epoch, snapshot.seq), self._known.get(holder, (0, 0)))
