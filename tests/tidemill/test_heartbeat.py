from __future__ import annotations

import asyncio
import os

import pytest

from tidemill.heartbeat import HEARTBEAT_FD_VARIABLE, beat


async def test_it_beats_at_once_and_again_and_again(monkeypatch: pytest.MonkeyPatch):
    ours, childs = os.pipe()
    monkeypatch.setenv(HEARTBEAT_FD_VARIABLE, str(childs))
    task = asyncio.create_task(beat(0.001))
    for _ in range(3):
        assert await asyncio.to_thread(os.read, ours, 1) == b"."
    task.cancel()
    os.close(ours)
    os.close(childs)


async def test_without_a_supervisor_it_does_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(HEARTBEAT_FD_VARIABLE, raising=False)
    await beat()


async def test_it_ends_when_the_supervisor_is_gone(monkeypatch: pytest.MonkeyPatch):
    ours, childs = os.pipe()
    monkeypatch.setenv(HEARTBEAT_FD_VARIABLE, str(childs))
    os.close(ours)
    await beat(0.001)
    os.close(childs)


async def test_a_full_pipe_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch):
    ours, childs = os.pipe()
    os.set_blocking(childs, False)
    while True:
        try:
            os.write(childs, b"." * 4096)
        except BlockingIOError:
            break
    os.set_blocking(childs, True)
    monkeypatch.setenv(HEARTBEAT_FD_VARIABLE, str(childs))
    task = asyncio.create_task(beat(0.001))
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    os.close(ours)
    os.close(childs)
