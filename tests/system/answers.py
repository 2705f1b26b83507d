"""Requests of the system tests, and whole answers to compare."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import nats
from nats.aio.client import Client as NatsClient

from pipeline.client import Client, Event, Stream
from tests.system.fleet import GIVE_UP_S

MODEL = "deepseek-v4.1-flash"
INTAKE = "v1.in.interactive.{tenant}"


def words(count: int, seed: int = 0) -> str:
    """Text of about `count` words that no other seed shares a beginning with."""
    return " ".join(f"w{seed}x{number * 7919 % 1000}" for number in range(count))


def chat(prompt: str, *, max_tokens: int = 16, seed: int = 1, stream: bool = True, **members: Any) -> dict[str, Any]:
    """A Chat Completions body of fixed length and fixed randomness."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "stream": stream,
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
        **members,
    }


@dataclass
class Answer:
    """Everything that one stream brought."""

    numbers: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    end: str = ""

    def add(self, number: int | None, end: str, body: dict[str, Any]) -> None:
        if number is None:
            self.notes.append(body)
            return
        self.numbers.append(number)
        self.bodies.append(body)
        self.end = end or self.end

    @property
    def deltas(self) -> list[tuple[str, str]]:
        """(reasoning, content) of every chunk."""
        parts = [
            choice.get("delta") or choice.get("message") or {}
            for body in self.bodies
            for choice in body.get("choices", [])
        ]
        return [(part.get("reasoning_content") or "", part.get("content") or "") for part in parts]

    @property
    def text(self) -> str:
        return "".join(reasoning + content for reasoning, content in self.deltas)

    @property
    def usage(self) -> dict[str, Any]:
        usage = self.bodies[-1]["usage"]
        assert isinstance(usage, dict)
        return usage

    @property
    def hit_tokens(self) -> int:
        return int(self.usage["prompt_cache_hit_tokens"])

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the last event, {} when there is none."""
        return dict(self.bodies[-1].get("error", {})) if self.bodies else {}

    @property
    def complete(self) -> bool:
        """Numbered 0..n, each once, in order, with a terminal event last."""
        return bool(self.end) and self.numbers == list(range(len(self.numbers)))


async def collect(stream: Stream, answer: Answer | None = None, *, until: int = -1) -> Answer:
    """Read a stream to its end, or until it has `until` numbered events."""
    answer = answer or Answer()
    async with asyncio.timeout(GIVE_UP_S):
        async for event in stream:
            take(answer, event)
            if len(answer.numbers) == until:
                break
    return answer


def take(answer: Answer, event: Event) -> None:
    answer.add(event.number, event.end, event.json())


async def ask(client: Client, body: dict[str, Any] | bytes, **publish: Any) -> Answer:
    """Publish and read the whole answer."""
    return await collect(await client.publish(body, **publish))


@asynccontextmanager
async def connected(url: str, tenant: str = "default", *, batch: bool = False) -> AsyncIterator[Client]:
    """A client for the time of the body."""
    async with await Client.connect([url], tenant, batch=batch) as client:
        yield client


@asynccontextmanager
async def raw_connection(url: str) -> AsyncIterator[NatsClient]:
    """Plain nats-py: what any publisher in any language can do."""
    connection = await nats.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def ask_raw(
    connection: NatsClient,
    body: bytes,
    headers: dict[str, str] | None = None,
    *,
    tenant: str = "default",
    rid: str = "",
    subject: str = INTAKE,
) -> Answer:
    """Publish with headers of one's own (None in a value drops that header) and read the answer; never says Want."""
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox)
    usual = {"Nats-Msg-Id": f"{tenant}:{rid or secrets.token_hex(16)}", "Tm-Reply": inbox}
    await connection.jetstream().publish(subject.format(tenant=tenant), body, headers={**usual, **(headers or {})})
    answer = Answer()
    while not answer.end:
        message = await subscription.next_msg(timeout=GIVE_UP_S)
        data = json.loads(message.data)
        answer.add(data.get("n"), data.get("end", ""), data["event"])
    await subscription.unsubscribe()
    return answer
