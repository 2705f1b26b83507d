from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv.layout import Bytes
from kv.region import (
    HEADER_BYTES,
    NUM_LEASES,
    BoundsError,
    Region,
    RegionError,
    RegionReader,
    RevokedError,
)

SIZE = 3 * 4096 + 100
ROOT = str(Path(__file__).parents[2])


def descs(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(-1, 2)


@pytest.fixture(params=["shared", "local"])
def region(request: pytest.FixtureRequest) -> Iterator[Region]:
    with getattr(Region, request.param)(SIZE) as made:
        made.array[:] = np.arange(SIZE) % 251
        yield made


def read(region: Region) -> RegionReader:
    return RegionReader.from_fd(region.readonly_fd()) if region.is_shared else RegionReader.of(region)


def dests(*lengths: int) -> list[Bytes]:
    return [np.full(n, 255, np.uint8) for n in lengths]


def in_child(code: str, *fds: int) -> subprocess.CompletedProcess[str]:
    """Run `code` in another process that inherits these descriptors; sys.argv[1:] names them."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, fds)],
        pass_fds=fds, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_reader_sees_what_the_owner_writes(region: Region):
    with read(region) as reader:
        epoch = region.grant()
        out = dests(10, 0, 4096)
        assert reader.read_into(descs((5, 10), (SIZE, 0), (SIZE - 4096, 4096)), out, epoch=epoch) == 4106
        assert (out[0] == region.array[5:15]).all()
        assert (out[2] == region.array[-4096:]).all()
        region.array[5] = 77
        assert reader.array[5] == 77
        assert (reader.region_id, reader.num_bytes) == (region.region_id, SIZE)


@pytest.mark.parametrize(
    "pair", [(SIZE, 1), (0, SIZE + 1), (-1, 2), (0, -1), (2**62, 2**62), (SIZE - 1, 2**63 - 1), (2**63 - 1, 1)]
)
def test_no_descriptor_reaches_outside_the_region(region: Region, pair: tuple[int, int]):
    with read(region) as reader:
        out = dests(4, 1)
        with pytest.raises(BoundsError, match=r"descriptor 1 .* is outside"):
            reader.read_into(descs((0, 4), pair), out, epoch=region.grant())
        assert (out[0] == 255).all()  # nothing was copied


def test_destinations_must_fit(region: Region):
    with read(region) as reader:
        wrong: tuple[tuple[Any, list[Bytes], str], ...] = (
            (descs((0, 4), (4, 4)), dests(4), "2 descriptors for 1 destinations"),
            (descs((0, 4), (4, 4)), dests(4, 5), r"descriptor 1 has 4 bytes, its destination \(5,\)"),
            (descs((0, 4)).astype(np.int32), dests(4), r"int64 \[n, 2\], not int32"),
            (np.zeros(4, np.int64), dests(4), r"int64 \[n, 2\]"),
        )
        for pairs, out, words in wrong:
            with pytest.raises(BoundsError, match=words):
                reader.read_into(pairs, out, epoch=region.grant())


def test_a_thousand_scattered_pieces_arrive_in_place(region: Region):
    rng = np.random.default_rng(3)
    pairs = np.stack([rng.integers(0, SIZE - 90, 1000), rng.integers(0, 90, 1000)], axis=1)
    with read(region) as reader:
        out = dests(*pairs[:, 1].tolist())
        reader.read_into(pairs, out, epoch=region.grant())
        for (offset, length), piece in zip(pairs.tolist(), out, strict=True):
            assert (piece == region.array[offset : offset + length]).all()


def test_revoking_one_lease_fails_its_reader_and_no_other(region: Region):
    with read(region) as reader:
        first, second = region.grant(), region.grant()
        assert region.revoke(first)
        assert not region.revoke(first)
        with pytest.raises(RevokedError, match=f"epoch {first} was revoked"):
            reader.read_into(descs((0, 4)), dests(4), epoch=first)
        assert reader.read_into(descs((0, 4)), dests(4), epoch=second) == 4


def test_a_lease_slot_that_is_used_again_has_a_higher_epoch(region: Region):
    seen: set[int] = set()
    for _ in range(3):
        epochs = [region.grant() for _ in range(NUM_LEASES)]
        with pytest.raises(RegionError, match=f"all {NUM_LEASES} leases are out"):
            region.grant()
        assert not seen & set(epochs)
        assert not seen or min(epochs) > max(seen)
        seen |= set(epochs)
        assert all(region.stands(epoch) for epoch in epochs)
        assert all(region.revoke(epoch) for epoch in epochs)
        assert not any(region.stands(epoch) for epoch in epochs)


@pytest.mark.parametrize("epoch", [0, 1, NUM_LEASES - 1, 3 * NUM_LEASES, 2**70, -1, -NUM_LEASES])
def test_an_invented_epoch_stands_for_nothing(region: Region, epoch: int):
    assert not region.stands(epoch)
    assert not region.revoke(epoch)


def test_size_and_contents_are_sealed_even_for_the_owners_own_user():
    with Region.shared(SIZE) as region:
        for flags in (os.O_RDONLY, os.O_RDWR):
            fd = os.open(f"/proc/self/fd/{region._fd}", flags)
            with pytest.raises(OSError, match=r"not permitted|Invalid argument|Bad file"):
                os.ftruncate(fd, 10)
            with pytest.raises(OSError, match=r"not permitted|Bad file"):
                os.pwrite(fd, b"x", HEADER_BYTES)
            with pytest.raises(OSError, match=r"not permitted|denied"):
                mmap.mmap(fd, SIZE)
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            os.close(fd)


def test_a_handed_out_descriptor_is_read_only():
    with Region.shared(SIZE) as region:
        fd = region.readonly_fd()
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        os.close(fd)


def test_a_readers_array_refuses_writing(region: Region):
    with read(region) as reader, pytest.raises(ValueError, match="read-only"):
        reader.array[0] = 1


def test_a_reader_that_writes_anyway_dies_and_changes_nothing():
    code = """
import ctypes, sys
from kv.region import RegionReader
reader = RegionReader.from_fd(int(sys.argv[1]))
at = reader.array.ctypes.data
print(ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(at & ~4095), 4096, 3), ctypes.get_errno(), flush=True)
ctypes.memset(at, 1, 1)
"""
    with Region.shared(SIZE) as region:
        region.array[:] = 9
        fd = region.readonly_fd()
        ended = in_child(code, fd)
        os.close(fd)
        assert ended.stdout.split() == ["-1", "13"], ended.stderr  # mprotect: permission denied
        assert ended.returncode == -signal.SIGSEGV
        assert region.array[0] == 9


def test_memory_outlives_a_killed_owner():
    code = """
import os, sys, time
from kv.region import Region
region = Region.shared(1 << 20)
region.array[:] = 42
print(os.getpid(), region._fd, region.grant(), flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        pid, fd, epoch = map(int, owner.stdout.readline().split())
        reader = RegionReader.from_fd(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY))
        out = dests(1 << 20)
        reader.read_into(descs((0, 1 << 20)), out, epoch=epoch)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        out[0][:] = 0
        assert reader.read_into(descs((0, 1 << 20)), out, epoch=epoch) == 1 << 20
        assert (out[0] == 42).all()


def test_closing_in_any_order_neither_raises_nor_crashes(region: Region):
    reader = read(region)
    mine, theirs = region.array[:10], reader.array[:10]
    region.close()
    region.close()
    mine[0] = 8
    assert theirs[0] == 8
    reader.close()
    reader.close()
    gc.collect()
    mine[0] = 9
    assert theirs[0] == 9
    for closed in (region, reader):
        with pytest.raises(RegionError, match="is closed here"):
            closed.array.sum()
    with pytest.raises(RegionError, match="local or closed"):
        region.readonly_fd()


def test_torch_tensors_keep_the_memory_alive():
    torch = pytest.importorskip("torch")
    region = Region.shared(SIZE)
    tensor = torch.from_numpy(region.array)
    region.close()
    tensor[3] = 200
    assert int(tensor[3]) == 200


def test_the_last_view_gives_the_memory_back():
    region = Region.shared(SIZE, name="tidemill-closing")
    view = region.array[1:]
    region.close()
    assert "tidemill-closing" in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert "tidemill-closing" not in Path("/proc/self/maps").read_text()


def memfd(size: int, *seals: int, head: bytes = b"") -> int:
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, head, 0)
    for seal in seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    return fd


def test_foreign_memory_is_refused_and_its_descriptor_closed():
    with Region.shared(SIZE) as region:
        head = region.raw[:40].tobytes()
    full = HEADER_BYTES + SIZE
    both = (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW)
    version, size = head[:8] + b"\x07" + head[9:], head[:16] + b"\x01" + head[17:]
    for fd, words in (
        (memfd(full, head=head), "size is not sealed"),
        (memfd(full, fcntl.F_SEAL_GROW, head=head), "size is not sealed"),
        (memfd(100, *both), "100 bytes are no region"),
        (memfd(full, *both), "wrong magic"),
        (memfd(full, *both, head=version), "region version 7"),
        (memfd(full, *both, head=size), f"says .* bytes but has {SIZE}"),
        (os.open(os.devnull, os.O_RDONLY), "not a region"),
    ):
        with pytest.raises(RegionError, match=words):
            RegionReader.from_fd(fd)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_impossible_regions_are_refused():
    for make in (Region.shared, Region.local):
        with pytest.raises(RegionError, match="at least one byte, not 0"):
            make(0)
        with pytest.raises(RegionError, match="egion of 1152921504606846976 bytes"):
            make(1 << 60)


def test_the_header_is_what_its_table_says():
    with Region.shared(SIZE) as region:
        raw = region.raw.tobytes()
        assert raw[:8] == b"TMREGION"
        assert [int.from_bytes(raw[a:b], "little") for a, b in ((8, 12), (12, 16), (16, 24))] == [1, 69_632, SIZE]
        assert raw[24:40].hex() == region.region_id
        assert set(raw[40:4096]) == {0}
        assert np.frombuffer(raw[4096:69_632], "<u8").tolist() == [1] * 8192
        epoch = region.grant()
        region.revoke(epoch)
        assert region.raw[4096:4104].view("<u8")[0] == 2
        assert ctypes.sizeof(ctypes.c_uint64) * NUM_LEASES == HEADER_BYTES - 4096
