"""lookup: the longest stored prefix and the engine to compute the rest. Its answer is a hint, not a lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import structlog

from kv.index import PrefixIndex
from pipeline.bus import Bus
from pipeline.errors import TransientError
from pipeline.events import Beacon, IndexChanged, PrefixMatched, PromptEncoded
from pipeline.membership import Membership
from pipeline.metrics import count
from stages.assigned import Assigned
from stages.balance import BLOCK_TOKENS, rank_prefill

log = structlog.get_logger()

INDEX_BYTES = 512 << 20  # bound of the prefix index. Source: ours; ~1.5 M keys


class Lookup:
    """Request stage: PromptEncoded in; PrefixMatched out, one alternative per engine, best first."""

    def __init__(self, membership: Membership, index: PrefixIndex) -> None:
        self._membership = membership
        self._index = index
        self._assigned = Assigned()

    async def handle(self, event: PromptEncoded) -> AsyncIterator[PrefixMatched]:
        """Yield engines in order of preference.

        Raises: TransientError when no fresh prefill engine serves the model.
        """
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
        self._index = index
        self._decode = msgspec.msgpack.Decoder(IndexChanged).decode
        self._syncs: dict[str, asyncio.Task[None]] = {}
        bus.subscribe(bus.topology.pattern("index"), self._changed, control=True)
        membership.on_change.append(self._heard)

    def _changed(self, _subject: str, _reply: str, payload: bytes, _headers: bytes | None) -> None:
        try:
            change = self._decode(payload)
        except msgspec.DecodeError:
            count("index_events_malformed")
            return
        if change.stored:
            self._index.stored(change.holder, change.epoch, change.seq, change.stored)
        else:
            self._index.removed(change.holder, change.epoch, change.seq, change.removed)
        self._sync_wanted()

    def _heard(self, beacon: Beacon) -> None:
        if "prefill" in beacon.roles and beacon.worker not in self._index.holders:
            self._sync(beacon.worker)

    def _sync_wanted(self) -> None:
        for holder in self._index.drain_wanted():
            self._sync(holder)

    def _sync(self, holder: str) -> None:
        if holder not in self._syncs:
            task = asyncio.get_running_loop().create_task(self._ask(holder))
            self._syncs[holder] = task
            task.add_done_callback(lambda _done: self._syncs.pop(holder, None))

    async def _ask(self, holder: str) -> None:
        subject = self._bus.topology.subject("index_sync", worker=holder)
        try:
            snapshot = self._decode(await self._bus.ask(subject, b"", 2.0))
        except (TransientError, msgspec.DecodeError) as error:
            count("index_syncs_failed")
            log.debug("index not synchronised", holder=holder, error=str(error))
            return
        self._index.snapshot(snapshot.holder, snapshot.epoch, snapshot.seq, snapshot.stored)
