from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from kv.layout import Bytes
from kv.links import Hello, InprocLink, LinkError, Links, RegionServer, ShmLink
from kv.region import Region, RegionError, RegionReader

ROOT = str(Path(__file__).parents[2])
SIZE = 1 << 20


@dataclass(frozen=True)
class Ticket:
    region: str
    num_bytes: int
    link: str
    address: str


def ticket(region: Region, address: str = "", link: str = "shm") -> Ticket:
    return Ticket(region.region_id, region.num_bytes, link, address)


OWNER = """
import asyncio, sys
import uvloop
from kv.links import RegionServer
from kv.region import Region

async def main():
    region = Region.shared(1 << 20)
    region.array[:] = 42
    with RegionServer(region) as server:
        print(region.region_id, region.num_bytes, server.address, region.grant(), flush=True)
        await asyncio.to_thread(sys.stdin.read)

(uvloop.run if sys.argv[1] == "uvloop" else asyncio.run)(main())
"""


@dataclass
class Owner:
    process: subprocess.Popen[str]
    ticket: Ticket
    epoch: int


@pytest.fixture(params=["uvloop", "asyncio"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    """Another process that serves a region full of 42."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, request.param],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        region, num_bytes, address, epoch = process.stdout.readline().split()
        yield Owner(process, Ticket(region, int(num_bytes), "shm", address), int(epoch))
        process.kill()


def run(runner: str, main: Callable[[], Any]) -> Any:
    return uvloop.run(main()) if runner == "uvloop" else asyncio.run(main())


def read_all(reader: RegionReader, epoch: int) -> Bytes:
    out = np.zeros(reader.num_bytes, np.uint8)
    reader.read_into(np.array([[0, reader.num_bytes]], np.int64), [out], epoch=epoch)
    return out


@pytest.mark.parametrize("runner", ["uvloop", "asyncio"])
def test_a_region_of_another_process_is_read_with_nobodys_help(owner: Owner, runner: str):
    async def main() -> None:
        with await ShmLink().attach(owner.ticket) as reader:
            owner.process.send_signal(signal.SIGSTOP)
            assert (read_all(reader, owner.epoch) == 42).all()
            owner.process.send_signal(signal.SIGKILL)
            owner.process.wait()
            assert (read_all(reader, owner.epoch) == 42).all()

    run(runner, main)


@pytest.mark.parametrize("runner", ["uvloop", "asyncio"])
def test_killing_the_owner_while_threads_read_hurts_no_reader(owner: Owner, runner: str):
    async def main() -> None:
        with await ShmLink().attach(owner.ticket) as reader:
            reads = [asyncio.to_thread(read_all, reader, owner.epoch) for _ in range(50)]
            tasks = [asyncio.ensure_future(read) for read in reads]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            owner.process.kill()
            assert all((out == 42).all() for out in await asyncio.gather(*tasks))
        owner.process.wait()
        with pytest.raises(LinkError, match="Connection refused"):
            await ShmLink().attach(owner.ticket)

    run(runner, main)


@pytest.mark.parametrize("runner", ["uvloop", "asyncio"])
def test_a_hundred_attach_at_once(owner: Owner, runner: str):
    async def main() -> None:
        readers = await asyncio.gather(*(ShmLink().attach(owner.ticket, 30) for _ in range(300)))
        assert {reader.region_id for reader in readers} == {owner.ticket.region}
        for reader in readers:
            reader.close()

    run(runner, main)


async def test_a_stopped_owner_is_an_error_after_the_timeout(owner: Owner):
    owner.process.send_signal(signal.SIGSTOP)
    with pytest.raises(LinkError, match=r"said nothing for 0\.05 s"):
        await ShmLink().attach(owner.ticket, 0.05)


async def test_a_ticket_of_another_region_is_refused(owner: Owner):
    for wrong in ({"region": "0" * 32}, {"num_bytes": 5}):
        with pytest.raises(LinkError, match="the ticket names region"):
            await ShmLink().attach(replace(owner.ticket, **wrong))


async def test_another_user_gets_nothing():
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    code = """
import asyncio, os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
print(socket.recv_fds(sock, 4096, 1)[:2])
"""
    with Region.shared(SIZE) as region, RegionServer(region) as server:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, server.address, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await child.communicate()
        assert out.decode().strip() == "(b'', [])"
        assert (server.num_refused, server.num_served) == (1, 0)


async def test_a_squatter_of_another_user_is_not_trusted():
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    code = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.bind("\\0tidemill-squatter-test"); sock.listen()
print("ready", flush=True)
sys.stdin.read()
"""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    await child.stdout.readline()
    with pytest.raises(LinkError, match="served by another user"):
        await ShmLink().attach(Ticket("0" * 32, SIZE, "shm", "tidemill-squatter-test"))
    await child.communicate(b"")


def num_fds() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def hello(region: Region, version: int = 1) -> bytes:
    return msgspec.msgpack.encode(Hello(version, region.region_id, region.num_bytes))


async def test_whatever_a_server_says_only_a_link_error_comes_out_and_no_descriptor_leaks():
    with Region.shared(SIZE) as region, Region.shared(SIZE) as other:
        foreign = os.memfd_create("foreign")
        cases: list[tuple[bytes, list[int], str]] = [
            (b"", [], "closed without handing over"),
            (hello(region), [], "closed without handing over"),
            (b"\xc1\xff", [region.readonly_fd()], "said rubbish"),
            (b"\x93\x01\x02", [region.readonly_fd()], "said rubbish"),
            (hello(region, 2), [region.readonly_fd()], "speaks version 2, this is 1"),
            (hello(region), [other.readonly_fd()], "announced another region than it handed over"),
            (hello(region), [foreign], "size is not sealed"),
        ]
        for number, (data, fds, words) in enumerate(cases):
            name = f"tidemill-rubbish-{os.getpid()}-{number}"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind("\0" + name)
                listener.listen()
                attaching = asyncio.ensure_future(ShmLink().attach(ticket(region, name), 5))
                peer, _ = await asyncio.to_thread(listener.accept)
                with peer:
                    if data:
                        socket.send_fds(peer, [data], fds)
                before = num_fds()
                with pytest.raises(LinkError, match=words):
                    await attaching
                assert num_fds() == before - 1  # the attaching socket itself
            for fd in fds:
                os.close(fd)


async def test_nobody_listening_is_named():
    with Region.local(10) as region, pytest.raises(LinkError, match="nowhere: Connection refused"):
        await ShmLink().attach(ticket(region, "nowhere"))


async def test_a_closed_server_serves_nobody_but_its_readers_stay():
    with Region.shared(SIZE) as region:
        region.array[:] = 7
        with RegionServer(region) as server:
            reader = await ShmLink(prefault=False).attach(ticket(region, server.address))
            assert server.num_served == 1
        server.close()
        with pytest.raises(LinkError, match="Connection refused"):
            await ShmLink().attach(ticket(region, server.address))
        assert (read_all(reader, region.grant()) == 7).all()
        reader.close()


async def test_serving_and_reading_leak_no_descriptor():
    with Region.shared(SIZE) as region, RegionServer(region) as server:
        counts = []
        for _ in range(5):
            (await ShmLink(prefault=False).attach(ticket(region, server.address))).close()
            counts.append(num_fds())
        assert len(set(counts)) == 1


async def test_a_region_that_closed_under_its_server_gives_a_clear_answer():
    region = Region.shared(SIZE)
    asked = ticket(region)
    with RegionServer(region) as server:
        region.close()
        with pytest.raises(LinkError, match="closed without handing over"):
            await ShmLink().attach(replace(asked, address=server.address))
        assert server.num_refused == 1


async def test_only_shared_regions_are_served():
    with Region.local(10) as region, pytest.raises(RegionError, match="local region cannot be served"):
        RegionServer(region)


async def test_an_inproc_reader_shares_the_owners_memory():
    link = InprocLink()
    with Region.local(SIZE) as region:
        link.add(region)
        with await link.attach(ticket(region, link="inproc")) as reader:
            region.array[3] = 200
            assert reader.array[3] == 200
        with pytest.raises(LinkError, match="the ticket names region"):
            await link.attach(replace(ticket(region), num_bytes=1))
        link.remove(region.region_id)
        link.remove(region.region_id)
        with pytest.raises(LinkError, match="not in this process"):
            await link.attach(ticket(region))
        link.add(region)
    with pytest.raises(LinkError, match="closed here"):
        await link.attach(Ticket(next(iter(link._regions)), SIZE, "inproc", ""))


async def test_links_attach_a_region_once_and_by_its_kind():
    inproc = InprocLink()
    links = Links({"inproc": inproc, "shm": ShmLink()})
    with Region.local(10) as mine, Region.shared(SIZE) as theirs, RegionServer(theirs) as server:
        inproc.add(mine)
        far = ticket(theirs, server.address)
        readers = await asyncio.gather(*(links.attach(far) for _ in range(20)))
        assert len(set(map(id, readers))) == server.num_served == 1
        assert (await links.attach(ticket(mine, link="inproc"))).num_bytes == 10
        with pytest.raises(LinkError, match="the ticket names region"):
            await links.attach(replace(far, num_bytes=3))
        with pytest.raises(LinkError, match="no link of kind 'pigeon' here; there are inproc, shm"):
            await links.attach(Ticket("f" * 32, 1, "pigeon", ""))
        links.detach(far.region)
        links.detach(far.region)
        assert (await links.attach(far)) is not readers[0]
        assert server.num_served == 2
        links.close()
        with pytest.raises(RegionError, match="closed here"):
            readers[0].array.sum()


async def test_a_failed_attach_can_be_tried_again():
    links = Links({"inproc": (inproc := InprocLink())})
    with Region.local(10) as region:
        asked = ticket(region, link="inproc")
        failed = await asyncio.gather(*(links.attach(asked) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(error, LinkError) for error in failed)
        inproc.add(region)
        assert (await links.attach(asked)).num_bytes == 10
        links.close()
