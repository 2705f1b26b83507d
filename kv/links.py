"""How a reader reaches a region: one interface, a kind for each way of moving bytes.

`inproc`: the region is in this process. `shm`: the owner hands a read-only descriptor of its memfd over an
abstract Unix socket to processes of the same user; from then on reading is memory access and needs nobody's
help, so it goes on when the owner is stopped or killed.

| kind   | address               |
|--------|-----------------------|
| inproc | empty                 |
| shm    | name of the socket    |

Source: facts-spikes 4 (send_fds under uvloop), facts-kv A4; R47: only descriptors travel on the bus.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Protocol, Self
from weakref import WeakValueDictionary

import msgspec

from kv.region import Region, RegionError, RegionReader

HELLO_VERSION = 1
ATTACH_TIMEOUT_S = 2.0  # 5 ms is usual; a starting owner may be busy faulting its pages in

_MAX_HELLO_BYTES = 4096  # ours has below 100
_RETRY_S = 0.005  # a full accept queue on a Unix socket answers at once: ask again
_BACKLOG = 128


class LinkError(ConnectionError):
    """The region of a ticket cannot be reached, or is not the one that the ticket names."""


class Ticket(Protocol):
    """What an offer says about its region. Any object with these fields will do."""

    @property
    def region(self) -> str: ...  # noqa: D102 - 32 hex digits

    @property
    def num_bytes(self) -> int: ...  # noqa: D102 - without the header

    @property
    def link(self) -> str: ...  # noqa: D102 - kind

    @property
    def address(self) -> str: ...  # noqa: D102 - means something to that kind only


class Link(Protocol):
    """One kind of way to a region."""

    async def attach(self, ticket: Ticket, timeout_s: float = ATTACH_TIMEOUT_S) -> RegionReader:
        """A reader of the ticket's region; the caller closes it. Raises: LinkError."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """What a region server says beside the descriptor."""

    version: int
    region: str
    num_bytes: int


class InprocLink:
    """Regions of this process, by id."""

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}

    def add(self, region: Region) -> None:
        """Make a region reachable. It stays its owner's."""
        self._regions[region.region_id] = region

    def remove(self, region_id: str) -> None:
        """No new reader from now on. Unknown ids are fine."""
        self._regions.pop(region_id, None)

    async def attach(self, ticket: Ticket, timeout_s: float = ATTACH_TIMEOUT_S) -> RegionReader:  # noqa: ARG002
        """A reader that shares the owner's map. Raises: LinkError when the region is not in this process."""
        region = self._regions.get(ticket.region)
        if region is None:
            raise LinkError(f"region {ticket.region} is not in this process")
        try:
            return _agreed(RegionReader.of(region), ticket)
        except RegionError as error:
            raise LinkError(str(error)) from error


class RegionServer:
    """Hands read-only descriptors of one shared region to processes of this user, on the running loop.

    `address` goes into tickets. Nothing is read from peers, so they cannot stall or confuse it.
    """

    def __init__(self, region: Region) -> None:
        """Listens at once. Raises: RegionError when the region is local."""
        region.raw  # noqa: B018 - a closed region raises here, not at the first peer
        if not region.is_shared:
            raise RegionError("a local region cannot be served to other processes")
        self.region = region
        self.address = f"tidemill-kv-{os.getpid()}-{secrets.token_hex(8)}"
        self.num_served = 0
        self.num_refused = 0  # peers of another user, or gone before their turn
        self._hello = msgspec.msgpack.encode(Hello(HELLO_VERSION, region.region_id, region.num_bytes))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + self.address)
        self._socket.listen(_BACKLOG)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Serve nobody any more; readers that are attached keep what they have. Can be called again."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._socket.accept()
        except OSError:  # gone meanwhile, or out of descriptors: the peer's attach ends with its own error
            self.num_refused += 1
            return
        with peer:
            peer.setblocking(False)
            if _peer_uid(peer) == os.getuid() and self._send(peer):
                self.num_served += 1
            else:
                self.num_refused += 1

    def _send(self, peer: socket.socket) -> bool:
        try:
            fd = self.region.readonly_fd()
        except RegionError:
            return False
        try:
            socket.send_fds(peer, [self._hello], [fd])  # far below any socket buffer: never partial
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


class ShmLink:
    """Regions of other processes on this host."""

    def __init__(self, *, prefault: bool = True) -> None:
        """prefault: map all pages at the attach (0.2 s a GiB) instead of during the first copies."""
        self._prefault = prefault

    async def attach(self, ticket: Ticket, timeout_s: float = ATTACH_TIMEOUT_S) -> RegionReader:
        """Fetch the descriptor and map it.

        Raises:
            LinkError: nobody listens, the owner runs as another user, says nothing in time, or serves something
                else than the ticket names.
        """
        try:
            async with asyncio.timeout(timeout_s):
                hello, fd = await _fetch(ticket.address)
        except TimeoutError:
            raise LinkError(f"the owner of {ticket.address} said nothing for {timeout_s} s") from None
        try:
            reader = await asyncio.to_thread(RegionReader.from_fd, fd, prefault=self._prefault)
        except RegionError as error:
            raise LinkError(f"{ticket.address}: {error}") from error
        if (hello.region, hello.num_bytes) != (reader.region_id, reader.num_bytes):
            reader.close()
            raise LinkError(f"{ticket.address} announced another region than it handed over")
        return _agreed(reader, ticket)


class Links:
    """The way to any ticket's region, by its link kind; a region is attached once and then reused."""

    def __init__(self, kinds: Mapping[str, Link]) -> None:
        self._kinds = dict(kinds)
        self._readers: dict[str, RegionReader] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of regions being attached

    async def attach(self, ticket: Ticket, timeout_s: float = ATTACH_TIMEOUT_S) -> RegionReader:
        """The reader of that region, which stays ours until `detach` or `close`. Raises: LinkError."""
        if (reader := self._readers.get(ticket.region)) is not None:
            return _agreed(reader, ticket)
        link = self._kinds.get(ticket.link)
        if link is None:
            raise LinkError(f"no link of kind {ticket.link!r} here; there are {', '.join(sorted(self._kinds))}")
        lock = self._locks.setdefault(ticket.region, asyncio.Lock())
        async with lock:
            reader = self._readers.get(ticket.region)
            if reader is None:
                reader = self._readers[ticket.region] = await link.attach(ticket, timeout_s)
        return _agreed(reader, ticket)

    def attached(self, ticket: Ticket) -> RegionReader | None:
        """The reader of that region if it is attached already. Raises: LinkError when the ticket disagrees with it."""
        reader = self._readers.get(ticket.region)
        return _agreed(reader, ticket) if reader is not None else None

    def detach(self, region_id: str) -> None:
        """Its owner is gone: give its memory back once running copies end. Unknown ids are fine."""
        reader = self._readers.pop(region_id, None)
        if reader is not None:
            reader.close()

    def close(self) -> None:
        """Detach all."""
        for region_id in list(self._readers):
            self.detach(region_id)


def _agreed(reader: RegionReader, ticket: Ticket) -> RegionReader:
    if (reader.region_id, reader.num_bytes) != (ticket.region, ticket.num_bytes):
        found = f"{reader.region_id} of {reader.num_bytes} bytes"
        raise LinkError(f"the ticket names region {ticket.region} of {ticket.num_bytes} bytes, found {found}")
    return reader


async def _fetch(address: str) -> tuple[Hello, int]:
    """One exchange with a region server. Raises: LinkError; a descriptor that came with an error is closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        await _connect(sock, address)
        if _peer_uid(sock) != os.getuid():  # anyone may listen on an abstract name
            raise LinkError(f"{address} is served by another user")
        await _readable(sock)
        try:
            data, fds, _, _ = socket.recv_fds(sock, _MAX_HELLO_BYTES, 1)
        except OSError as error:
            raise LinkError(f"{address}: {error.strerror}") from error
    try:
        if not data or len(fds) != 1:
            raise LinkError(f"{address} closed without handing over a descriptor")
        hello = msgspec.msgpack.decode(data, type=Hello)
        if hello.version != HELLO_VERSION:
            raise LinkError(f"{address} speaks version {hello.version}, this is {HELLO_VERSION}")
    except (LinkError, msgspec.DecodeError) as error:
        for fd in fds:
            os.close(fd)
        raise error if isinstance(error, LinkError) else LinkError(f"{address} said rubbish: {error}") from error
    return hello, fds[0]


async def _connect(sock: socket.socket, address: str) -> None:
    while True:
        try:
            sock.connect("\0" + address)
        except BlockingIOError:
            await asyncio.sleep(_RETRY_S)
        except OSError as error:
            raise LinkError(f"{address}: {error.strerror or error}") from error
        else:
            return


async def _readable(sock: socket.socket) -> None:
    """Until there is something to read. `sock_recv` of the loop would lose the descriptor."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def _peer_uid(sock: socket.socket) -> int:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)
