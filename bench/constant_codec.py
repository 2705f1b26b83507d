"""A codec worker whose parse stage makes no JSON: what the fabric costs by itself.

    python -m bench.constant_codec NATS_URL EVENT_BYTES WORKER_ID

Everything else is the product's: intake, encoding, owner, frames, batches. Every token becomes the same event.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields

import uvloop

import codec.codec
from pipeline.events import Plan, RequestBody
from pipeline.ownership import Ownership
from pipeline.topology import Topology
from pipeline.worker import Worker
from stages.codec import ChatEncoding, Codec
from tidemill.heartbeat import beat
from tidemill.worker import SERVED_MODELS

PIECE_BYTES = 7  # median of a token's text in the stub's answers
VOCABULARY = 129_280  # Source: facts-model 1
_event = b""
_pieces: list[bytes] = []


class ConstantStream:
    """Implements TokenStream."""

    can_stop = False
    stopped = False

    def feed(self, token: int) -> bytes:  # noqa: ARG002 -- that is the point
        """The constant."""
        return _event

    @property
    def frame(self) -> tuple[bytes, bytes]:
        """All but the piece, as in a chunk."""
        return _event[: -PIECE_BYTES - 1], _event[-1:]

    @property
    def pieces(self) -> list[bytes]:
        """The constant, for every token."""
        return _pieces

    def passed(self, num_tokens: int) -> None:
        """See TokenStream."""

    def finish(self, reason: str, plan: Plan, num_tokens: int) -> bytes:  # noqa: ARG002 -- that is the point
        """The constant."""
        return _event


@dataclass(frozen=True, slots=True)
class ConstantEncoding(ChatEncoding):
    """An encoded request whose answer is constant."""

    def open(self, rid: str, created: int, choice: int) -> ConstantStream:  # type: ignore[override]  # noqa: ARG002
        """A stream of constants."""
        return ConstantStream()


class ConstantCodec(Codec):
    """The codec stage with constant answers."""

    async def handle(self, event: RequestBody) -> AsyncGenerator[ChatEncoding]:
        """As the product's."""
        async for encoding in super().handle(event):
            yield ConstantEncoding(**{field.name: getattr(encoding, field.name) for field in fields(encoding)})


async def _serve(url: str, worker_id: str) -> None:
    chat = await asyncio.to_thread(codec.codec.Codec.load, SERVED_MODELS)
    worker = await Worker.join([url], worker_id, ["codec", "parse"], Topology.load())
    stage = ConstantCodec(chat, worker.membership, b"")
    worker.add(Ownership(worker.bus, worker.membership, stage, worker.epoch).run)
    heart = asyncio.get_running_loop().create_task(beat())
    await worker.run()
    heart.cancel()


def main() -> None:
    """Serve until SIGTERM."""
    global _event  # noqa: PLW0603 -- set once, before anything runs
    url, event_bytes, worker_id = sys.argv[1:]
    _event = b'"' + b"x" * (int(event_bytes) - 2) + b'"'
    _pieces.extend([_event[-PIECE_BYTES - 1 : -1]] * VOCABULARY)
    uvloop.run(_serve(url, worker_id))


if __name__ == "__main__":
    main()
