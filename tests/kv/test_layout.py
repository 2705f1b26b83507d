from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kv.layout import Component, Kind, Layout, LayoutError

WINDOW = 128


def v41(backtracking: int) -> Layout:
    """The released geometry (facts-model 7.1 and 8): 43 rings, 3 compressors, 4 global sources."""
    slots = WINDOW + backtracking
    paged = [
        Component(name=f"{part}.{layer}", kind=Kind.PAGED, entries=64 if layer < 20 else 128, entry_bytes=size)
        for layer in (2, 8, 14, 20)
        for part, size in (("index", 68), ("main", 288))
    ]
    rings = [
        Component(name=f"ring.{layer}", kind=Kind.RING, entries=slots, entry_bytes=528, stored=layer < 20)
        for layer in range(43)
    ]
    groups = [
        Component(name=f"group.{layer}", kind=Kind.STATE, entries=2 + backtracking - 1, entry_bytes=4096, stored=False)
        for layer in (2, 8, 14)
    ]
    return Layout(components=(*paged, *rings, *groups), block_align=math.lcm(128, 288), state_align=math.lcm(32, 528))


def small(**changes: object) -> Layout:
    fields: dict[str, object] = {
        "components": (
            Component(name="k", kind=Kind.PAGED, entries=128, entry_bytes=6),
            Component(name="c", kind=Kind.PAGED, entries=64, entry_bytes=4, align=64),
            Component(name="ring", kind=Kind.RING, entries=5, entry_bytes=3),
            Component(name="open", kind=Kind.STATE, entries=1, entry_bytes=7, align=8, stored=False),
        ),
        "block_align": 64,
        "state_align": 16,
    }
    return Layout(**(fields | changes))  # type: ignore[arg-type]


def test_v41_blocks_and_state_have_the_published_sizes():
    layout = v41(6)
    assert layout.payload_bytes == 113_920 == 128 * 890
    assert layout.block_bytes == 114_048
    assert layout.state_bytes == 3_128_928
    assert layout.stored_state_bytes == 1_415_040
    assert v41(12).state_bytes == 3_339_072


def test_v41_components_lie_layer_by_layer_index_before_main():
    layout = v41(6)
    assert [layout.offset(n) for n in ("index.2", "main.2", "index.8", "main.20")] == [0, 4352, 22_784, 77_056]
    assert layout.offset("ring.20") == 1_415_040
    assert layout.offset("group.2") == 43 * 134 * 528


def test_offsets_follow_each_components_alignment():
    layout = small()
    assert (layout.offset("k"), layout.offset("c")) == (0, 768)
    assert (layout.offset("ring"), layout.offset("open")) == (0, 16)
    assert (layout.block_bytes, layout.payload_bytes, layout.state_bytes) == (1024, 1024, 32)
    assert layout.stored_state_bytes == 15


def test_views_share_memory_and_never_overlap():
    layout = small()
    for names, size in ((("k", "c"), layout.block_bytes), (("ring", "open"), layout.state_bytes)):
        raw = np.zeros(size, np.uint8)
        for mark, name in enumerate(names, start=1):
            layout.view(raw, name)[:] = mark
        for mark, name in enumerate(names, start=1):
            part = layout.component(name)
            assert layout.view(raw, name).shape == (part.entries, part.entry_bytes)
            assert (raw == mark).sum() == part.num_bytes


@pytest.mark.parametrize(
    "raw",
    [np.zeros(1023, np.uint8), np.zeros(1024, np.int8), np.zeros((1, 1024), np.uint8), np.zeros(2048, np.uint8)[::2]],
)
def test_a_view_of_the_wrong_buffer_is_refused(raw: np.ndarray):
    with pytest.raises(LayoutError, match=r"k lies in contiguous uint8 \[1024\]"):
        small().view(raw, "k")


def test_an_unknown_component_is_named_with_those_that_exist():
    with pytest.raises(LayoutError, match="no component 'nope'; there are k, c, ring, open"):
        small().offset("nope")


def test_plain_form_survives_json_and_keeps_the_digest():
    layout = v41(6)
    again = Layout.from_plain(json.loads(json.dumps(layout.to_plain())))
    assert again == layout
    assert again.digest() == layout.digest()


def test_digest_is_stable_across_versions_of_this_code():
    assert small().digest().hex() == "56568d0787d098de167527f957b20cf3"


@pytest.mark.parametrize("field", ["name", "kind", "entries", "entry_bytes", "align", "stored"])
def test_digest_changes_with_every_field_of_a_component(field: str):
    other = {"name": "x", "kind": Kind.RING, "entries": 127, "entry_bytes": 8, "align": 2, "stored": False}
    first = {"name": "k", "kind": Kind.PAGED, "entries": 128, "entry_bytes": 6, "align": 1, "stored": True}
    rest = small().components[1:2]

    def digest(**values: object) -> bytes:
        return Layout(components=(Component(**values), *rest)).digest()  # type: ignore[arg-type]

    assert digest(**first) != digest(**(first | {field: other[field]}))


@pytest.mark.parametrize("field", ["block_tokens", "block_align", "state_align"])
def test_digest_changes_with_every_field_of_the_layout(field: str):
    assert small(**{field: 256}).digest() != small().digest()


def test_impossible_layouts_are_refused_by_name():
    ring = Component(name="ring", kind=Kind.RING, entries=5, entry_bytes=3)
    page = Component(name="page", kind=Kind.PAGED, entries=5, entry_bytes=3)
    gone = Component(name="gone", kind=Kind.STATE, entries=5, entry_bytes=3, stored=False)
    for components, words in (
        ((ring,), "at least one paged"),
        ((page, page), r"given twice: \['page'\]"),
        ((page, gone, ring), "stored state components must come before"),
    ):
        with pytest.raises(LayoutError, match=words):
            Layout(components=components)
    with pytest.raises(LayoutError, match="block_align must be at least 1, not 0"):
        small(block_align=0)
    with pytest.raises(LayoutError, match="page: entry_bytes must be at least 1, not 0"):
        Component(name="page", kind=Kind.PAGED, entries=5, entry_bytes=0)
    with pytest.raises(LayoutError, match="needs a name"):
        Component(name="", kind=Kind.PAGED, entries=5, entry_bytes=1)


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"components": 3, "block_tokens": 1, "block_align": 1, "state_align": 1},
        {"components": [["k", "sphere", 1, 1, 1, True]], "block_tokens": 1, "block_align": 1, "state_align": 1},
        {"components": [["k", "paged", 1]], "block_tokens": 1, "block_align": 1, "state_align": 1},
        {"components": [["k", "paged", 1, 1, 1, True]], "block_tokens": "x", "block_align": 1, "state_align": 1},
        {"components": [["k", "paged", 0, 1, 1, True]], "block_tokens": 1, "block_align": 1, "state_align": 1},
    ],
)
def test_rubbish_is_not_a_layout(plain: dict[str, object]):
    with pytest.raises(LayoutError):
        Layout.from_plain(plain)
