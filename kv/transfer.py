"""The copy of a handoff: read what is lacking out of a lent region, then prove that it is what was offered.

Letters: b blocks and s pieces of state in an offer, l blocks that the reader lacks.
Source: facts-kv A2 and facts-spikes 4 (inline up to 1 MiB, one job for a thread from 4 MiB); the rest: ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv.block import CHECKSUM_BYTES, KEY_BYTES, checksum
from kv.layout import Bytes
from kv.region import RegionReader

INLINE_BYTES = 1 << 20  # a smaller copy is shorter than the ~100 us of a hop to a thread. Source: facts-spikes 4

_DESC_BYTES = 16


class OfferError(ValueError):
    """An offer contradicts itself, its region or the reader's layout."""


class ChecksumError(ValueError):
    """The copy is not what was offered.

    blocks, state: numbers, within the offer, of the blocks and pieces of state whose bytes differ.
    """

    def __init__(self, blocks: tuple[int, ...], state: tuple[int, ...]) -> None:
        super().__init__(f"checksum mismatch in blocks {list(blocks)} and state pieces {list(state)}")
        self.blocks = blocks
        self.state = state


class HasEpoch(Protocol):
    """The part of a ticket that says which lease the bytes lie under."""

    @property
    def epoch(self) -> int: ...  # noqa: D102


class WireOffer(Protocol):
    """An offer as it travels: descriptors are (offset, length) pairs of i64le. Any object with these fields."""

    @property
    def ticket(self) -> HasEpoch: ...  # noqa: D102

    @property
    def block_keys(self) -> bytes: ...  # noqa: D102

    @property
    def blocks(self) -> bytes: ...  # noqa: D102

    @property
    def state(self) -> bytes: ...  # noqa: D102

    @property
    def checksums(self) -> bytes: ...  # noqa: D102

    @property
    def lease_ns(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A checked offer. blocks: int64 [b, 2], state: int64 [s, 2] of (offset, length) in the region.

    checksums: b + s, blocks first. `lease_ns`: wall clock until which the owner keeps the bytes.
    """

    epoch: int
    block_keys: tuple[bytes, ...]
    blocks: NDArray[np.int64]
    state: NDArray[np.int64]
    checksums: tuple[bytes, ...]
    lease_ns: int

    @classmethod
    def from_wire(cls, wire: WireOffer) -> Offer:
        """Raises: OfferError when the parts do not fit each other. Bounds are the region's to check."""
        blocks, state = _descs(wire.blocks, "blocks"), _descs(wire.state, "state")
        keys = _pieces(wire.block_keys, KEY_BYTES, "block_keys")
        sums = _pieces(wire.checksums, CHECKSUM_BYTES, "checksums")
        if len(keys) != len(blocks):
            raise OfferError(f"{len(keys)} keys for {len(blocks)} blocks")
        if len(sums) != len(blocks) + len(state):
            raise OfferError(f"{len(sums)} checksums for {len(blocks)} blocks and {len(state)} pieces of state")
        return cls(
            epoch=wire.ticket.epoch,
            block_keys=keys,
            blocks=blocks,
            state=state,
            checksums=sums,
            lease_ns=wire.lease_ns,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks offered, whether or not a reader lacks them."""
        return len(self.block_keys)

    @property
    def state_bytes(self) -> int:
        """Bytes of all pieces of state together."""
        return sum(self.state[:, 1].tolist())

    def lapsed(self, now_ns: int | None = None) -> bool:
        """Whether the lease's time is over, so that reading need not begin. Wall clock."""
        return (time.time_ns() if now_ns is None else now_ns) >= self.lease_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """What one handoff moved."""

    num_bytes: int
    num_blocks_read: int
    num_blocks_had: int


def rows(numbers: Sequence[int], row_bytes: int, base: int = 0) -> NDArray[np.int64]:
    """Descriptors of equal rows that lie one after another from offset `base`: int64 [n, 2], for an offer."""
    descs = np.empty((len(numbers), 2), np.int64)
    descs[:, 0] = np.asarray(numbers, np.int64) * row_bytes + base
    descs[:, 1] = row_bytes
    return descs


def to_wire(descs: NDArray[np.int64]) -> bytes:
    """Descriptors [n, 2] as i64le pairs."""
    return descs.astype("<i8", copy=False).tobytes()


def transfer(
    reader: RegionReader,
    offer: Offer,
    dest_blocks: Sequence[Bytes],
    dest_state: Bytes,
    lacking: Sequence[int],
    *,
    verify: bool = True,
) -> TransferResult:
    """Read the blocks numbered `lacking` and all state; when this returns, the copy is good.

    One synchronous job: run it in a thread above `INLINE_BYTES` (numpy and xxhash let go of the GIL).
    dest_blocks: l writable uint8 views, one for each number in `lacking`; dest_state: uint8, the pieces of state
    land in it one after another. verify: compare checksums of the copy; off only in tests that show why.

    Raises:
        OfferError: a number, a descriptor or a destination does not fit; nothing was copied.
        RevokedError: the lease ended during the copy. Told before any wrong checksum, which it explains.
        ChecksumError: bytes of the copy differ from those offered; names all of them.
    """
    jobs = _jobs(reader, offer, dest_blocks, dest_state, lacking)
    source = reader.array
    bad: list[int] = []
    num_bytes = 0
    for number, offset, dest in jobs:
        dest[:] = source[offset : offset + len(dest)]
        num_bytes += len(dest)
        # at once, while the copy is in this core's cache: 5 times as fast as from memory
        if verify and checksum(dest) != offer.checksums[number]:
            bad.append(number)
    reader.check(offer.epoch)
    if bad:
        raise ChecksumError(
            tuple(n for n in bad if n < offer.num_blocks),
            tuple(n - offer.num_blocks for n in bad if n >= offer.num_blocks),
        )
    return TransferResult(
        num_bytes=num_bytes, num_blocks_read=len(lacking), num_blocks_had=offer.num_blocks - len(lacking)
    )


def _jobs(
    reader: RegionReader, offer: Offer, dest_blocks: Sequence[Bytes], dest_state: Bytes, lacking: Sequence[int]
) -> list[tuple[int, int, Bytes]]:
    """(number of the checksum, offset, destination) of every piece, all checked."""
    if len(dest_blocks) != len(lacking):
        raise OfferError(f"{len(lacking)} blocks are lacking, but there are {len(dest_blocks)} destinations")
    room = reader.num_bytes
    jobs: list[tuple[int, int, Bytes]] = []
    pairs = offer.blocks.tolist()
    for number, dest in zip(lacking, dest_blocks, strict=True):
        if not 0 <= number < offer.num_blocks:
            raise OfferError(f"block {number} is lacking, but {offer.num_blocks} are offered")
        offset, length = pairs[number]
        _check_piece(f"block {number}", offset, length, room)
        _check_dest(f"block {number}", length, dest)
        jobs.append((number, offset, dest))
    _check_dest("the state", offer.state_bytes, dest_state)
    start = 0
    for number, (offset, length) in enumerate(offer.state.tolist(), start=offer.num_blocks):
        _check_piece(f"state piece {number - offer.num_blocks}", offset, length, room)
        jobs.append((number, offset, dest_state[start : start + length]))
        start += length
    return jobs


def _check_piece(what: str, offset: int, length: int, room: int) -> None:
    # plain integers, not RegionReader.check_bounds: 10 us cheaper at nine blocks, a fifth of a 1 MiB copy
    if offset < 0 or length < 0 or offset + length > room:
        raise OfferError(f"{what} at {offset} with {length} bytes is outside the region of {room}")


def _check_dest(what: str, length: int, dest: Bytes) -> None:
    if dest.dtype != np.uint8 or dest.shape != (length,) or not dest.flags.carray:
        raise OfferError(
            f"{what} has {length} bytes; its destination must be writable uint8 of that size, "
            f"contiguous, not {dest.dtype} {dest.shape}"
        )


def _descs(raw: bytes, name: str) -> NDArray[np.int64]:
    if len(raw) % _DESC_BYTES:
        raise OfferError(f"{name}: {len(raw)} bytes are not whole (offset, length) pairs")
    return np.frombuffer(raw, "<i8").reshape(-1, 2)


def _pieces(raw: bytes, size: int, name: str) -> tuple[bytes, ...]:
    if len(raw) % size:
        raise OfferError(f"{name}: {len(raw)} bytes are not whole pieces of {size}")
    return tuple(raw[i : i + size] for i in range(0, len(raw), size))
