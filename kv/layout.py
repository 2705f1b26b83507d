"""The byte layout of a model's KV, computed from a list of components.

Two buffers exist: a *block* holds what is paged (the global KV of `block_tokens` positions, all layers
together) and a *state* holds what a request owns once (sliding-window rings, open compressor groups). Both
are flat bytes here; an engine lays its own dtypes over the views.

Letters: E entries, B bytes of one entry.
Source: facts-model 7.1 and 8 (sizes and order), facts-system R10 (computed, never hard-coded); the form: ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

LAYOUT_VERSION = 1  # part of the digest: a changed meaning of these fields must never hit old blocks
BLOCK_TOKENS = 128  # grain of hits and of storing. Source: facts-system R9

Bytes = NDArray[np.uint8]


class LayoutError(ValueError):
    """A layout, its plain form, or a buffer that should have its shape is not usable."""


class Kind(StrEnum):
    """Where a component lives and how its entries are addressed."""

    PAGED = "paged"  # in blocks: entry = position // ratio within the block
    RING = "ring"  # in the state: entry = position mod entries
    STATE = "state"  # in the state: the engine's own meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One named array of equal entries.

    `entries`: per block when paged (128 for ratio 1, 64 for ratio 2), else in all. `align`: its offset is
    padded to a multiple of it, in bytes. `stored`: whether it may outlive the request in a cache tier.

    Raises:
        LayoutError: empty name, or a size below one.
    """

    name: str
    kind: Kind
    entries: int
    entry_bytes: int
    align: int = 1
    stored: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise LayoutError("a component needs a name")
        for label, value in (("entries", self.entries), ("entry_bytes", self.entry_bytes), ("align", self.align)):
            if value < 1:
                raise LayoutError(f"component {self.name}: {label} must be at least 1, not {value}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries, without padding."""
        return self.entries * self.entry_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All components of one model, in memory order; every size follows from them.

    `block_align` and `state_align` round the two totals up, so that neighbours in a pool stay aligned.
    Stored state components come before the others: a snapshot is then one prefix of the state.

    Raises:
        LayoutError: no paged component, a name given twice, or a stored state component after a dropped one.
    """

    components: tuple[Component, ...]
    block_tokens: int = BLOCK_TOKENS
    block_align: int = 1
    state_align: int = 1
    block_bytes: int = field(init=False, compare=False)
    state_bytes: int = field(init=False, compare=False)
    stored_state_bytes: int = field(init=False, compare=False)
    _places: Mapping[str, tuple[Component, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        paged = [c for c in self.components if c.kind is Kind.PAGED]
        state = [c for c in self.components if c.kind is not Kind.PAGED]
        block_places, block_end = _place(paged)
        state_places, state_end = _place(state)
        _, stored_end = _place(c for c in state if c.stored)
        for name, value in (
            ("block_bytes", round_up(block_end, self.block_align)),
            ("state_bytes", round_up(state_end, self.state_align)),
            ("stored_state_bytes", stored_end),
            ("_places", block_places | state_places),
        ):
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        for label, value in (
            ("block_tokens", self.block_tokens),
            ("block_align", self.block_align),
            ("state_align", self.state_align),
        ):
            if value < 1:
                raise LayoutError(f"{label} must be at least 1, not {value}")
        names = [c.name for c in self.components]
        if twice := {n for n in names if names.count(n) > 1}:
            raise LayoutError(f"component names given twice: {sorted(twice)}")
        if not any(c.kind is Kind.PAGED for c in self.components):
            raise LayoutError("a layout needs at least one paged component")
        stored = [c.stored for c in self.components if c.kind is not Kind.PAGED]
        if stored != sorted(stored, reverse=True):
            raise LayoutError("stored state components must come before the dropped ones")

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block without its trailing padding."""
        _, end = _place(c for c in self.components if c.kind is Kind.PAGED)
        return end

    def component(self, name: str) -> Component:
        """The component of that name. Raises: LayoutError when there is none."""
        return self._find(name)[0]

    def offset(self, name: str) -> int:
        """Byte offset inside the block (paged) or inside the state (all others)."""
        return self._find(name)[1]

    def view(self, raw: Bytes, name: str) -> Bytes:
        """That component of one block or state: [E, B], sharing memory with `raw`, valid as long as it.

        raw: uint8 [block_bytes] for a paged component, [state_bytes] for the others, contiguous.

        Raises:
            LayoutError: `raw` has another size or type, or the name is unknown.
        """
        component, start = self._find(name)
        want = self.block_bytes if component.kind is Kind.PAGED else self.state_bytes
        if raw.dtype != np.uint8 or raw.shape != (want,) or not raw.flags.c_contiguous:
            raise LayoutError(f"{name} lies in contiguous uint8 [{want}], not {raw.dtype} {raw.shape}")
        return raw[start : start + component.num_bytes].reshape(component.entries, component.entry_bytes)

    def _find(self, name: str) -> tuple[Component, int]:
        try:
            return self._places[name]
        except KeyError:
            raise LayoutError(f"no component {name!r}; there are {', '.join(self._places)}") from None

    def digest(self) -> bytes:
        """16 bytes that change with anything a reader of the bytes depends on. Part of every root key."""
        return blake2b(msgspec.msgpack.encode((LAYOUT_VERSION, self.to_plain())), digest_size=16).digest()

    def to_plain(self) -> dict[str, Any]:
        """Strings, numbers and lists only, for a beacon or a file; `from_plain` gives an equal layout."""
        return {
            "block_tokens": self.block_tokens,
            "block_align": self.block_align,
            "state_align": self.state_align,
            "components": [[c.name, str(c.kind), c.entries, c.entry_bytes, c.align, c.stored] for c in self.components],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Layout:
        """Inverse of `to_plain`. Raises: LayoutError naming what is wrong."""
        try:
            return cls(
                components=tuple(_component(*row) for row in plain["components"]),
                block_tokens=int(plain["block_tokens"]),
                block_align=int(plain["block_align"]),
                state_align=int(plain["state_align"]),
            )
        except LayoutError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"not a layout: {error!r}") from error


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def _component(name: str, kind: str, entries: int, entry_bytes: int, align: int, stored: bool) -> Component:
    return Component(
        name=name,
        kind=Kind(kind),
        entries=int(entries),
        entry_bytes=int(entry_bytes),
        align=int(align),
        stored=bool(stored),
    )


def _place(components: Iterable[Component]) -> tuple[dict[str, tuple[Component, int]], int]:
    """Offsets in order, each rounded up to its component's alignment, and the end of the last."""
    places: dict[str, tuple[Component, int]] = {}
    end = 0
    for component in components:
        start = round_up(end, component.align)
        places[component.name] = (component, start)
        end = start + component.num_bytes
    return places, end
