"""Registered memory that others read one-sidedly and never write.

A region is one memfd: a header and the bytes. Its owner maps it writable first and seals it then, so that no
one, not even a process of the same user, can map it writable, write to it, or change its size afterwards;
readers get a read-only descriptor. What was read counts only if the lease it was read under still stands
after the copy.

| offset | bytes | header field                                                          |
|-------:|------:|-----------------------------------------------------------------------|
|      0 |     8 | magic "TMREGION"                                                      |
|      8 |     4 | version, u32 little-endian (all numbers are)                          |
|     12 |     4 | header size in bytes: where the region's own bytes begin              |
|     16 |     8 | region size in bytes, without the header                              |
|     24 |    16 | region id, random                                                     |
|     40 |  4056 | zero                                                                  |
|   4096 | 65536 | 8192 lease words, u64: the generation of each lease slot, from 1      |

An *epoch* names one lease: generation * 8192 + slot. Revoking raises the word, so that every later check of
that epoch fails, while readers under other leases go on undisturbed.

Source: facts-kv A4 (rules), facts-spikes 4 (measured, traps); the lease words: ours.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kv.layout import Bytes

MAGIC = b"TMREGION"
VERSION = 1
NUM_LEASES = 8192  # offers that one engine can have out at once; far above any queue of ours
_WORDS_AT = 4096  # apart from the header page, which readers check once
HEADER_BYTES = _WORDS_AT + 8 * NUM_LEASES

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), Linux 5.14; Python 3.11 has no names for them
_POPULATE_CHUNK_BYTES = 64 << 20  # madvise holds the GIL: ~50 ms a piece (facts-spikes 4: 512 MiB take 336 ms)
_F_SEAL_FUTURE_WRITE = 0x10  # fcntl(2), Linux 5.1; Python 3.11 has no name for it
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RegionError(OSError):
    """A region could not be made, opened or used."""


class BoundsError(RegionError, ValueError):
    """A descriptor points outside the region, or does not fit its destination."""


class RevokedError(RegionError):
    """The lease ended before the copy did: the bytes may be anything."""


class _Mapping:
    """Header and bytes of a region in this process's address space."""

    def __init__(self, raw: Bytes, memory: mmap.mmap | None) -> None:
        self._raw: Bytes | None = raw
        self._memory = memory  # to close; None when it is another's

    @property
    def raw(self) -> Bytes:
        """uint8 [header + region]. Raises: RegionError after `close`."""
        if self._raw is None:
            raise RegionError("the region is closed here")
        return self._raw

    @property
    def array(self) -> Bytes:
        """uint8 [num_bytes]. Views of it stay valid after `close`: the last one to die unmaps the memory."""
        return self.raw[HEADER_BYTES:]

    @property
    def num_bytes(self) -> int:
        """Size without the header."""
        return len(self.raw) - HEADER_BYTES

    @property
    def region_id(self) -> str:
        """32 hex digits."""
        return self.raw[24:40].tobytes().hex()

    @property
    def _words(self) -> NDArray[np.uint64]:
        return self.raw[_WORDS_AT:HEADER_BYTES].view("<u8")

    def stands(self, epoch: int) -> bool:
        """Whether the lease of that epoch has not been revoked."""
        generation, slot = divmod(epoch, NUM_LEASES)
        return generation > 0 and int(self._words[slot]) == generation

    def close(self) -> None:
        """Let go of the memory, in any order with views of it. Can be called again."""
        memory, self._memory, self._raw = self._memory, None, None
        if memory is not None:
            with suppress(BufferError):  # views are alive: they keep the map, and the last one unmaps it
                memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Region(_Mapping):
    """Memory that its owner computes in and lends to readers. Make it with `shared` or `local`."""

    def __init__(self, memory: mmap.mmap, fd: int | None) -> None:
        super().__init__(_bytes_of(memory), memory)
        self._fd = fd
        self._spare = deque(range(NUM_LEASES))
        self._granted: set[int] = set()
        self.raw[:8] = np.frombuffer(MAGIC, np.uint8)
        self.raw[8:16].view("<u4")[:] = VERSION, HEADER_BYTES
        self.raw[16:24].view("<u8")[0] = self.num_bytes
        self.raw[24:40] = np.frombuffer(secrets.token_bytes(16), np.uint8)
        self._words[:] = 1

    @classmethod
    def shared(cls, num_bytes: int, *, name: str = "tidemill-kv", prefault: bool = True) -> Region:
        """A region that other processes can attach to. `name` shows in /proc/PID/maps.

        Raises:
            RegionError: the size is below one byte, or the kernel refuses the memory.
        """
        total = _total(num_bytes)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, total)
            memory = mmap.mmap(fd, total)  # before the seal: the only writable map there will ever be
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise RegionError(error.errno, f"no shared region of {num_bytes} bytes: {error.strerror}") from error
        return cls._made(memory, fd, prefault=prefault)

    @classmethod
    def local(cls, num_bytes: int, *, prefault: bool = False) -> Region:
        """The same in private memory, for engines and readers of one process.

        Raises:
            RegionError: as `shared`.
        """
        total = _total(num_bytes)
        try:
            memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise RegionError(error.errno, f"no region of {num_bytes} bytes: {error.strerror}") from error
        return cls._made(memory, None, prefault=prefault)

    @classmethod
    def _made(cls, memory: mmap.mmap, fd: int | None, *, prefault: bool) -> Region:
        if prefault:
            _populate(memory, _POPULATE_WRITE)
        return cls(memory, fd)

    @property
    def is_shared(self) -> bool:
        """Whether other processes can attach."""
        return self._fd is not None

    def readonly_fd(self) -> int:
        """A new read-only descriptor; the caller closes it. Raises: RegionError for a local or closed region."""
        if self._fd is None:
            raise RegionError("a local or closed region has no descriptor")
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def grant(self) -> int:
        """The epoch of a new lease: goes into the offer of the bytes that the owner keeps in place for it.

        Raises:
            RegionError: all leases are out.
        """
        if not self._spare:
            raise RegionError(errno.EAGAIN, f"all {NUM_LEASES} leases are out")
        slot = self._spare.popleft()
        epoch = int(self._words[slot]) * NUM_LEASES + slot
        self._granted.add(epoch)
        return epoch

    def revoke(self, epoch: int) -> bool:
        """End a lease; only after that may its bytes change. False: it had ended already.

        A reader compares the word after its copy. On x86 neither stores nor loads are reordered among
        themselves, so it cannot see a byte that was written after this and still find the old word; elsewhere
        the checksum decides.
        """
        if epoch not in self._granted:
            return False
        self._granted.remove(epoch)
        generation, slot = divmod(epoch, NUM_LEASES)
        self._words[slot] = generation + 1
        self._spare.append(slot)
        return True

    def close(self) -> None:
        """Also closes the descriptor; attached readers keep the memory until they close."""
        super().close()
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class RegionReader(_Mapping):
    """Somebody's region, mapped so that writing is impossible."""

    def __init__(self, raw: Bytes, memory: mmap.mmap | None) -> None:
        super().__init__(raw, memory)
        self._check_header()

    @classmethod
    def of(cls, region: Region) -> RegionReader:
        """A reader in the owner's own process: it shares the map and survives the owner's `close`.

        Its array is read-only for numpy; only another process's map is protected by the kernel.
        """
        raw = region.raw.view()
        raw.flags.writeable = False
        return cls(raw, None)

    @classmethod
    def from_fd(cls, fd: int, *, prefault: bool = True) -> RegionReader:
        """Map a received descriptor, which is closed in any case.

        Raises:
            RegionError: it is no sealed region of this version. Without the seals its owner could shrink it,
                and reading would kill this process.
        """
        try:
            size = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & _SIZE_SEALS != _SIZE_SEALS:
                raise RegionError("the region's size is not sealed")
            if size <= HEADER_BYTES:
                raise RegionError(f"{size} bytes are no region")
            memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except RegionError:
            raise
        except OSError as error:
            raise RegionError(error.errno, f"not a region: {error.strerror}") from error
        finally:
            os.close(fd)
        if prefault:
            _populate(memory, _POPULATE_READ)
        return cls(_bytes_of(memory), memory)

    def check(self, epoch: int) -> None:
        """Raises: RevokedError when the lease of that epoch is over; call it after the copy."""
        if not self.stands(epoch):
            raise RevokedError(f"the lease of epoch {epoch} was revoked")

    def check_bounds(self, descs: NDArray[np.int64]) -> None:
        """descs: int64 [n, 2] of (offset, length). Raises: BoundsError naming the first that lies outside."""
        if descs.dtype != np.int64 or descs.ndim != 2 or descs.shape[1] != 2:
            raise BoundsError(f"descriptors are int64 [n, 2], not {descs.dtype} {descs.shape}")
        offset, length = descs[:, 0], descs[:, 1]
        outside = (length < 0) | (length > self.num_bytes) | (offset < 0) | (offset > self.num_bytes - length)
        if outside.any():
            first = int(outside.argmax())
            raise BoundsError(f"descriptor {first} {tuple(descs[first].tolist())} is outside {self.num_bytes} bytes")

    def read_into(self, descs: NDArray[np.int64], dests: Sequence[Bytes], *, epoch: int) -> int:
        """Copy each descriptor's bytes into the view of the same number; returns the bytes copied.

        descs: int64 [n, 2] of (offset, length); dests: n writable uint8 [length]. Nothing is copied before all
        are checked; what was copied counts only if no error came out.

        Raises:
            BoundsError: a descriptor lies outside, or a view has another length.
            RevokedError: the lease ended before the copy did.
        """
        self.check_bounds(descs)
        if len(dests) != len(descs):
            raise BoundsError(f"{len(descs)} descriptors for {len(dests)} destinations")
        pairs = descs.tolist()
        for number, ((_, length), dest) in enumerate(zip(pairs, dests, strict=True)):
            if dest.shape != (length,):
                raise BoundsError(f"descriptor {number} has {length} bytes, its destination {dest.shape}")
        source = self.array
        for (offset, length), dest in zip(pairs, dests, strict=True):
            np.copyto(dest, source[offset : offset + length])
        self.check(epoch)
        return int(descs[:, 1].sum())

    def _check_header(self) -> None:
        raw = self.raw
        if len(raw) <= HEADER_BYTES or raw[:8].tobytes() != MAGIC:
            raise RegionError("not a region: wrong magic")
        version, header_bytes = (int(v) for v in raw[8:16].view("<u4"))
        size = int(raw[16:24].view("<u8")[0])
        if (version, header_bytes) != (VERSION, HEADER_BYTES):
            raise RegionError(f"region version {version} with {header_bytes} B of header; this is {VERSION}")
        if size != self.num_bytes:
            raise RegionError(f"the region says {size} bytes but has {self.num_bytes}")


def _bytes_of(memory: mmap.mmap) -> Bytes:
    """All bytes of the map. This keeps its buffer exported; torch.frombuffer does not, and close() would unmap it."""
    return np.frombuffer(memory, np.uint8)


def _total(num_bytes: int) -> int:
    if num_bytes < 1:
        raise RegionError(f"a region has at least one byte, not {num_bytes}")
    return HEADER_BYTES + num_bytes


def _populate(memory: mmap.mmap, advice: int) -> bool:
    """Fault all pages in now, in pieces; False where the kernel cannot, and they come at first touch."""
    try:
        for start in range(0, len(memory), _POPULATE_CHUNK_BYTES):
            memory.madvise(advice, start, min(_POPULATE_CHUNK_BYTES, len(memory) - start))
    except OSError:
        return False
    return True
