"""Who has which blocks: the lookup worker's view of every holder's stored keys.

It is a hint. Holders tell changes in numbered events; what is lost or late makes the hint worse, never an
answer wrong, because the engine that accepts a request pins what it really has.

Holders are bits of an integer, so that one walk along a prompt's keys answers for all of them at once.
Letters: b blocks of a prompt.
Source: ours (facts-kv and the fault list gave the tests: gaps, restarts, growth under churn).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kv.block import split_keys

# Measured with tracemalloc on CPython 3.11 (tests/kv/test_index.py keeps them honest within a factor of two):
_KEY_COST_BYTES = 190  # the key object, its mask, its place in an ordered dictionary
_HOLDING_COST_BYTES = 90  # its place in one holder's set, and that holder's own key object
_REMEMBERED_EVENTS = 1024  # kept for replay after a snapshot; a holder that is further behind is asked again
_REMEMBERED_EPOCHS = 4096  # of forgotten holders, so that a worker that wakes up late is recognised
_SWEEP_KEYS = 256  # keys of forgotten holders that each change clears away: no pause above ~0.1 ms


@dataclass(slots=True, kw_only=True)
class IndexCounts:
    """Everything that was not simply applied."""

    stale_epoch: int = 0  # events of an earlier life of the holder
    repeated: int = 0  # events with a number that was seen
    gaps: int = 0
    refused_snapshots: int = 0  # older than the events that could be replayed upon them
    evicted: int = 0  # keys forgotten for room


@dataclass(slots=True)
class _Holder:
    """bit: its place in every mask. next_seq: number of the next event. late: events since a gap, for replay."""

    epoch: int
    bit: int
    next_seq: int = 1
    in_sync: bool = True
    keys: set[bytes] = field(default_factory=set)
    late: list[tuple[int, bool, bytes]] = field(default_factory=list)


class PrefixIndex:
    """Longest stored prefix per holder, bounded in bytes; the least recently matched or stored keys go first.

    Along one prompt the deepest goes first: a block without its parent can never be hit. Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: estimated memory that keys may take; the least recently used are forgotten beyond it."""
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, not {max_bytes}")
        self.max_bytes = max_bytes
        self.counts = IndexCounts()
        self._holders: dict[str, _Holder] = {}
        self._names: dict[int, str] = {}  # bit -> holder
        self._live = 0  # mask of all living holders
        self._masks: OrderedDict[bytes, int] = OrderedDict()  # key -> holders, least recently used first
        self._num_holdings = 0
        self._dead: list[_Holder] = []  # forgotten ones whose bits are still being cleared
        self._spare_bits: list[int] = []
        self._epochs: OrderedDict[str, int] = OrderedDict()  # of forgotten holders
        self._wanting: dict[str, int] = {}

    @property
    def num_keys(self) -> int:
        """Keys known now, of all holders together."""
        return len(self._masks)

    @property
    def num_bytes(self) -> int:
        """Estimated memory of all keys."""
        return self.num_keys * _KEY_COST_BYTES + self._num_holdings * _HOLDING_COST_BYTES

    @property
    def holders(self) -> dict[str, int]:
        """Epoch of every known holder."""
        return {name: holder.epoch for name, holder in self._holders.items()}

    @property
    def out_of_sync(self) -> dict[str, int]:
        """Epoch of every holder of which events are missing; ask again now and then, requests get lost too."""
        return {name: holder.epoch for name, holder in self._holders.items() if not holder.in_sync}

    def match(self, keys: bytes) -> dict[str, int]:
        """Number of leading blocks that each holder has, without a hole; holders without the first are left out.

        keys: [b] 16-byte keys of a prompt, in order.
        """
        split = split_keys(keys)
        found: dict[str, int] = {}
        alive, depth = self._live, 0
        if not alive:
            return found  # nobody is known yet; the walk below ends where the last holder drops out
        for mask in map(self._masks.get, split):
            still = alive & mask if mask else 0
            if still != alive:
                self._found(found, alive & ~still, depth)
                alive = still
                if not alive:
                    break
            depth += 1
        self._found(found, alive, depth)
        for key in reversed(split[:depth]):
            self._masks.move_to_end(key)
        return found

    def stored(self, holder: str, epoch: int, seq: int, keys: bytes) -> bool:
        """Apply event number `seq` (from 1 in each epoch): these keys can be hit. False: ask for a snapshot."""
        return self._event(holder, epoch, seq, keys, stored=True)

    def removed(self, holder: str, epoch: int, seq: int, keys: bytes) -> bool:
        """Apply event number `seq`: these keys are gone. False: ask for a snapshot."""
        return self._event(holder, epoch, seq, keys, stored=False)

    def snapshot(self, holder: str, epoch: int, seq: int, keys: bytes) -> bool:
        """Replace all that is known of a holder by its state just after its event `seq`.

        Events that overtook the snapshot are applied upon it. False: it was too old; ask again.
        """
        split = split_keys(keys)  # before anything is changed: rubbish raises
        entry = self._enter(holder, epoch)
        if entry is None:
            return self._is_in_sync(holder)
        late = [event for event in entry.late if event[0] > seq]
        if seq + 1 + len(late) < entry.next_seq:
            self.counts.refused_snapshots += 1
            self._want(holder, entry)
            return False
        self._clear(entry, len(entry.keys))
        self._apply(entry, split, stored=True)
        entry.next_seq = max(entry.next_seq, seq + 1)
        entry.in_sync, entry.late = True, []
        self._wanting.pop(holder, None)
        for _, stored, some in late:
            self._apply(entry, split_keys(some), stored=stored)
        self._trim()
        return True

    def forget(self, holder: str) -> None:
        """The holder is gone: never matched again, at once. Its memory is given back by later calls or `sweep`."""
        entry = self._holders.pop(holder, None)
        if entry is None:
            return
        self._wanting.pop(holder, None)
        self._live &= ~entry.bit
        del self._names[entry.bit]
        self._dead.append(entry)
        self._epochs[holder] = entry.epoch
        if len(self._epochs) > _REMEMBERED_EPOCHS:
            self._epochs.popitem(last=False)

    def drain_wanted(self) -> dict[str, int]:
        """Holders that must be asked for a snapshot, with their epochs; each is named once until another gap."""
        wanted, self._wanting = self._wanting, {}
        return wanted

    def sweep(self, num_keys: int = _SWEEP_KEYS) -> bool:
        """Clear up to that many keys of forgotten holders. True: nothing is left to clear."""
        while self._dead and num_keys > 0:
            entry = self._dead[-1]
            num_keys -= self._clear(entry, num_keys)
            if not entry.keys:
                self._dead.pop()
                self._spare_bits.append(entry.bit)
        return not self._dead

    def check(self) -> None:
        """Raises: AssertionError when the index contradicts itself. Slow: for tests and soaks."""
        everyone = [*self._holders.values(), *self._dead]
        by_key: dict[bytes, int] = {}
        for entry in everyone:
            for key in entry.keys:
                by_key[key] = by_key.get(key, 0) | entry.bit
        bits = [entry.bit for entry in everyone] + self._spare_bits
        for rule, holds in (
            ("every mask says who has the key", by_key == dict(self._masks)),
            ("every holding is counted", self._num_holdings == sum(len(entry.keys) for entry in everyone)),
            ("a bit belongs to one holder", len(bits) == len(set(bits))),
            ("bits are names", self._live == sum(self._names) == sum(e.bit for e in self._holders.values())),
            ("memory is bounded", self.num_bytes <= self.max_bytes),
        ):
            if not holds:
                raise AssertionError(rule)

    def _event(self, holder: str, epoch: int, seq: int, keys: bytes, *, stored: bool) -> bool:
        split = split_keys(keys)  # before anything is changed: rubbish raises
        entry = self._enter(holder, epoch)
        if entry is None:
            return self._is_in_sync(holder)
        if seq < entry.next_seq:
            self.counts.repeated += 1
            return entry.in_sync
        if seq > entry.next_seq:
            self.counts.gaps += 1
            self._want(holder, entry)
        entry.next_seq = seq + 1
        if not entry.in_sync:
            entry.late.append((seq, stored, keys))
            del entry.late[:-_REMEMBERED_EVENTS]
        self._apply(entry, split, stored=stored)
        self._trim()
        self.sweep()
        return entry.in_sync

    def _enter(self, holder: str, epoch: int) -> _Holder | None:
        """The holder's entry in this epoch, made anew for a new life; None for an earlier one."""
        entry = self._holders.get(holder)
        known = self._epochs.get(holder, 0) if entry is None else entry.epoch
        if epoch < known:
            self.counts.stale_epoch += 1
            return None
        if entry is not None and epoch == known:
            return entry
        self.forget(holder)
        self._epochs.pop(holder, None)
        entry = _Holder(epoch=epoch, bit=self._spare_bits.pop() if self._spare_bits else self._new_bit())
        self._holders[holder] = entry
        self._names[entry.bit] = holder
        self._live |= entry.bit
        return entry

    def _new_bit(self) -> int:
        return 1 << len(self._holders) + len(self._dead)

    def _is_in_sync(self, holder: str) -> bool:
        entry = self._holders.get(holder)
        return entry is None or entry.in_sync

    def _want(self, holder: str, entry: _Holder) -> None:
        entry.in_sync = False
        self._wanting[holder] = entry.epoch

    def _found(self, found: dict[str, int], mask: int, depth: int) -> None:
        while mask and depth:
            bit = mask & -mask
            found[self._names[bit]] = depth
            mask ^= bit

    def _apply(self, entry: _Holder, keys: list[bytes], *, stored: bool) -> None:
        for key in reversed(keys):
            if stored:
                self._add(entry, key)
            elif key in entry.keys:
                entry.keys.remove(key)
                self._unmask(entry, key)

    def _add(self, entry: _Holder, key: bytes) -> None:
        if key in entry.keys:
            return
        entry.keys.add(key)
        self._num_holdings += 1
        self._masks[key] = self._masks.get(key, 0) | entry.bit
        self._masks.move_to_end(key)

    def _unmask(self, entry: _Holder, key: bytes) -> None:
        self._num_holdings -= 1
        rest = self._masks[key] & ~entry.bit
        if rest:
            self._masks[key] = rest
        else:
            del self._masks[key]

    def _clear(self, entry: _Holder, num_keys: int) -> int:
        """Take up to that many keys from the holder; returns how many."""
        count = min(num_keys, len(entry.keys))
        for _ in range(count):
            self._unmask(entry, entry.keys.pop())
        return count

    def _trim(self) -> None:
        while self.num_bytes > self.max_bytes:
            key, mask = self._masks.popitem(last=False)
            self.counts.evicted += 1
            for entry in (*self._holders.values(), *self._dead):
                if entry.bit & mask:
                    entry.keys.remove(key)
                    self._num_holdings -= 1
