from __future__ import annotations

import asyncio

from pipeline.metrics import counters
from pipeline.notes import Notes
from tests.pipeline.fabric import eventually


async def test_notes_are_told_together_in_order_and_not_in_the_callers_turn():
    told: list[int] = []
    notes = Notes(0.001)
    for number in range(3):
        notes.add(lambda number=number: told.append(number))  # type: ignore[misc]
    await asyncio.sleep(0)
    assert told == []
    await eventually(lambda: told == [0, 1, 2])


async def test_what_is_sent_early_is_not_told_again():
    told: list[str] = []
    notes = Notes(0.001)
    notes.add(lambda: told.append("first"))
    notes.send()
    assert told == ["first"]
    notes.add(lambda: told.append("second"))
    await eventually(lambda: told == ["first", "second"])
    await asyncio.sleep(0.005)
    assert told == ["first", "second"]


async def test_a_note_that_fails_keeps_no_other_from_being_told():
    told: list[str] = []
    before = counters["notes_failed"]
    notes = Notes(0.001)
    notes.add(lambda: told.append(1 / 0))  # type: ignore[arg-type]
    notes.add(lambda: told.append("after it"))
    notes.send()
    assert told == ["after it"]
    assert counters["notes_failed"] == before + 1


async def test_a_note_may_add_another():
    told: list[str] = []
    notes = Notes(0.001)
    notes.add(lambda: notes.add(lambda: told.append("later")))
    notes.send()
    assert told == []
    await eventually(lambda: told == ["later"])
