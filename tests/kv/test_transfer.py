from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv.block import checksum
from kv.layout import Bytes
from kv.links import ShmLink
from kv.region import Region, RegionReader, RevokedError
from kv.transfer import ChecksumError, Offer, OfferError, TransferResult, rows, to_wire, transfer

ROOT = str(Path(__file__).parents[2])
BLOCK, NUM_BLOCKS, STATE = 4_000, 9, 10_001
STATE_AT = BLOCK * NUM_BLOCKS
TABLE = [4, 0, 8, 3, 5]  # pool blocks of the prompt, in its order


@dataclass(frozen=True)
class Ticket:
    epoch: int


@dataclass(frozen=True)
class Wire:
    """An offer as the bus carries it."""

    ticket: Ticket
    block_keys: bytes
    blocks: bytes
    state: bytes
    checksums: bytes
    lease_ns: int = 1_000


@dataclass
class Ends:
    """A prefill engine's region and what it offers, and a decode engine's memory."""

    region: Region
    reader: RegionReader
    wire: Wire
    blocks: Bytes
    state: Bytes

    @property
    def offer(self) -> Offer:
        return Offer.from_wire(self.wire)

    def read(self, lacking: Sequence[int] = range(5), **options: bool) -> TransferResult:
        views = list(self.blocks[: len(lacking)])
        return transfer(self.reader, self.offer, views, self.state, lacking, **options)


@pytest.fixture(params=["shared", "local"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with getattr(Region, request.param)(STATE_AT + STATE) as region:
        region.array[:] = np.random.default_rng(5).integers(0, 256, region.num_bytes)
        blocks = rows(TABLE, BLOCK)
        state = np.array([[STATE_AT, 1], [STATE_AT + 1, STATE - 1]], np.int64)
        pieces = [region.array[o : o + n] for o, n in (*blocks.tolist(), *state.tolist())]
        wire = Wire(
            Ticket(region.grant()),
            b"".join(bytes([i]) * 16 for i in range(5)),
            to_wire(blocks),
            to_wire(state),
            b"".join(map(checksum, pieces)),
        )
        reader = RegionReader.from_fd(region.readonly_fd()) if region.is_shared else RegionReader.of(region)
        with reader:
            yield Ends(region, reader, wire, np.zeros((6, BLOCK), np.uint8), np.zeros(STATE, np.uint8))


def test_the_copy_is_what_was_offered(ends: Ends):
    assert ends.read() == TransferResult(num_bytes=5 * BLOCK + STATE, num_blocks_read=5, num_blocks_had=0)
    for row, number in enumerate(TABLE):
        assert (ends.blocks[row] == ends.region.array[number * BLOCK :][:BLOCK]).all()
    assert (ends.state == ends.region.array[STATE_AT:]).all()


def test_only_what_is_lacking_is_read(ends: Ends):
    assert ends.read([4, 2]) == TransferResult(num_bytes=2 * BLOCK + STATE, num_blocks_read=2, num_blocks_had=3)
    assert (ends.blocks[0] == ends.region.array[TABLE[4] * BLOCK :][:BLOCK]).all()
    assert (ends.blocks[1] == ends.region.array[TABLE[2] * BLOCK :][:BLOCK]).all()
    assert not ends.blocks[2:].any()
    assert ends.read([]).num_bytes == STATE


@pytest.mark.parametrize("at", [0, BLOCK - 1, 1234])
@pytest.mark.parametrize("number", range(5))
def test_one_flipped_bit_in_any_block_is_found_and_named(ends: Ends, number: int, at: int):
    ends.region.array[TABLE[number] * BLOCK + at] ^= 16
    with pytest.raises(ChecksumError, match=rf"blocks \[{number}\] and state pieces \[\]") as caught:
        ends.read()
    assert (caught.value.blocks, caught.value.state) == ((number,), ())
    have = [i for i in range(5) if i != number]
    assert ends.read(have).num_blocks_had == 1  # whoever has that block already is not concerned


def test_all_bad_pieces_are_named_together(ends: Ends):
    for at in (TABLE[1] * BLOCK, TABLE[3] * BLOCK, STATE_AT, STATE_AT + STATE - 1):
        ends.region.array[at] ^= 1
    with pytest.raises(ChecksumError) as caught:
        ends.read()
    assert (caught.value.blocks, caught.value.state) == ((1, 3), (0, 1))


def test_swapped_blocks_are_found(ends: Ends):
    descs = ends.offer.blocks.copy()
    descs[[1, 2]] = descs[[2, 1]]
    ends.wire = replace(ends.wire, blocks=to_wire(descs))
    with pytest.raises(ChecksumError) as caught:
        ends.read()
    assert caught.value.blocks == (1, 2)


def test_without_checks_a_flipped_byte_passes_which_is_why_they_are_on(ends: Ends):
    ends.region.array[TABLE[0] * BLOCK] ^= 1
    assert ends.read(verify=False).num_blocks_read == 5


def test_a_revoked_lease_fails_the_copy_with_or_without_checks(ends: Ends):
    ends.region.revoke(ends.wire.ticket.epoch)
    ends.region.array[:] = 0  # reused: the checksums are wrong as well, but that is not the news
    for verify in (True, False):
        with pytest.raises(RevokedError):
            ends.read(verify=verify)


class RevokeInTheMiddle(np.ndarray):
    """A destination whose length is asked for between two copies: there the lease ends."""

    region: Region
    epoch: int

    def __len__(self) -> int:
        self.region.revoke(self.epoch)
        return int(self.shape[0])


def test_a_lease_that_ends_between_two_blocks_fails_the_copy(ends: Ends):
    views: list[Any] = list(ends.blocks[:5])
    views[3] = views[3].view(RevokeInTheMiddle)
    views[3].region, views[3].epoch = ends.region, ends.wire.ticket.epoch
    assert ends.region.stands(ends.wire.ticket.epoch)
    with pytest.raises(RevokedError):
        transfer(ends.reader, ends.offer, views, ends.state, range(5))
    assert (ends.blocks[4] == ends.region.array[TABLE[4] * BLOCK :][:BLOCK]).all()  # it went on to the end


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks": b"x" * 17}, "blocks: 17 bytes are not whole"),
        ({"state": b"x" * 8}, "state: 8 bytes are not whole"),
        ({"block_keys": b"x" * 81}, "block_keys: 81 bytes are not whole"),
        ({"checksums": b"x" * 20}, "checksums: 20 bytes"),
        ({"block_keys": b"x" * 64}, "4 keys for 5 blocks"),
        ({"checksums": b"x" * 96}, "6 checksums for 5 blocks and 2 pieces"),
        ({"blocks": to_wire(rows([*TABLE[:4], 11], BLOCK))}, "block 4 at 44000 with 4000 bytes is outside"),
        ({"blocks": to_wire(rows(TABLE, -1))}, "block 0 at -4 with -1 bytes is outside"),
        ({"blocks": to_wire(rows(TABLE, BLOCK - 1))}, "block 0 has 3999 bytes; its destination"),
        ({"state": to_wire(np.array([[STATE_AT + 1, STATE - 1], [STATE_AT + STATE, 1]]))}, "state piece 1 at"),
        ({"state": to_wire(np.array([[0, 2**62], [0, STATE - 2**62]]))}, "state piece 0 at 0"),
        ({"state": to_wire(np.array([[0, 1], [0, 1]]))}, "the state has 2 bytes; its destination"),
    ],
)
def test_offers_that_contradict_themselves_are_refused_before_anything_is_copied(
    ends: Ends, change: dict[str, bytes], words: str
):
    ends.wire = replace(ends.wire, **change)  # type: ignore[arg-type]
    with pytest.raises(OfferError, match=words):
        ends.read()
    assert not ends.blocks.any()
    assert not ends.state.any()


def test_destinations_that_do_not_fit_are_refused_before_anything_is_copied(ends: Ends):
    good = list(ends.blocks[:2])
    frozen = ends.blocks[1].view()
    frozen.flags.writeable = False
    strided = np.zeros(2 * BLOCK, np.uint8)[::2]
    wrong: tuple[tuple[list[Any], Bytes, list[int], str], ...] = (
        (good, ends.state, [0], "1 blocks are lacking, but there are 2 destinations"),
        (good, ends.state, [0, 5], "block 5 is lacking, but 5 are offered"),
        (good, ends.state, [-1, 0], "block -1 is lacking"),
        ([good[0], good[1][1:]], ends.state, [0, 1], r"block 1 has 4000 bytes.*\(3999,\)"),
        ([good[0], good[1].view(np.int8)], ends.state, [0, 1], "block 1 .* not int8"),
        ([good[0], frozen], ends.state, [0, 1], "block 1 .* must be writable"),
        ([good[0], strided], ends.state, [0, 1], "block 1 .*contiguous"),
        (good, ends.state[1:], [0, 1], "the state has 10001 bytes"),
    )
    for views, state, lacking, words in wrong:
        with pytest.raises(OfferError, match=words):
            transfer(ends.reader, ends.offer, views, state, lacking)
    assert not ends.blocks.any()


def test_rubbish_offers_raise_only_our_errors(ends: Ends):
    rng = np.random.default_rng(11)
    for _ in range(500):
        parts = {
            name: rng.bytes(int(rng.choice([0, 16, 32, 80, 112, int(rng.integers(0, 200))])))
            for name in ("block_keys", "blocks", "state", "checksums")
        }
        chosen: dict[str, Any] = {name: parts[name] for name in parts if rng.random() < 0.5}
        ends_now = replace(ends, wire=replace(ends.wire, **chosen))
        try:
            ends_now.read()
        except (OfferError, ChecksumError, RevokedError):
            continue
        assert not chosen or set(chosen) == {"block_keys"}


def test_a_lease_lapses_by_the_wall_clock(ends: Ends):
    offer = ends.offer
    assert (offer.lapsed(999), offer.lapsed(1_000), offer.lapsed()) == (False, True, True)


OWNER = """
import asyncio, sys
import numpy as np
from kv.block import checksum
from kv.links import RegionServer
from kv.region import Region
from kv.transfer import rows, to_wire

async def main():
    region = Region.shared(64 * 65536)
    region.array[:] = np.random.default_rng(1).integers(0, 256, region.num_bytes, dtype=np.uint8)
    blocks = rows(range(64), 65536)
    sums = b"".join(checksum(region.array[o : o + n]) for o, n in blocks.tolist())
    with RegionServer(region) as server:
        epoch = region.grant()
        print(region.region_id, region.num_bytes, server.address, epoch, to_wire(blocks).hex(), sums.hex(), flush=True)
        for line in iter(lambda: sys.stdin.readline(), ""):
            await asyncio.sleep(0)
            if line == "reuse\\n":  # what an owner does when a lease expires: revoke, then the blocks get new bytes
                region.revoke(epoch)
                region.array[:] = 0
            print("ok", flush=True)
            while line == "serve\\n" and not server.num_served:
                await asyncio.sleep(0.001)

asyncio.run(main())
"""


@dataclass(frozen=True)
class FullTicket(Ticket):
    region: str
    num_bytes: int
    link: str
    address: str


def test_a_real_owner_that_revokes_and_reuses_during_reads_never_gets_wrong_bytes_accepted():
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None

        def tell(line: str) -> None:
            assert owner.stdin is not None
            owner.stdin.write(line + "\n")
            owner.stdin.flush()

        region, size, address, epoch, blocks, sums = owner.stdout.readline().split()
        tell("serve")
        ticket = FullTicket(int(epoch), region, int(size), "shm", address)
        wire = Wire(ticket, b"k" * 16 * 64, bytes.fromhex(blocks), b"", bytes.fromhex(sums))
        offer, dest = Offer.from_wire(wire), np.zeros((64, 65536), np.uint8)
        with asyncio.run(ShmLink().attach(ticket)) as reader:
            expected = reader.array.copy().reshape(64, 65536)
            told, accepted = False, 0
            while True:
                dest[:] = 1
                if accepted == 20 and not told:
                    told = True
                    tell("reuse")  # some time during the next copies
                try:
                    # without checksums: the lease alone must be enough
                    transfer(reader, offer, list(dest), dest[0, :0], range(64), verify=False)
                except RevokedError:
                    break
                assert (dest == expected).all()
                accepted += 1
            assert accepted >= 20
        owner.stdin.close()
