"""parse: token ids into the events of the request's own protocol. A stream stage: one parser per choice."""

from __future__ import annotations

from collections.abc import Sequence

from codec.chat import ChatStream
from codec.models import ParseSpec, StreamMeta, Usage
from codec.vocab import OutputVocab
from pipeline.events import Plan


class Parse:
    """One choice's parser: `feed` token by token, `finish` once. Pure, so the owner may run it again."""

    __slots__ = ("_chat", "can_stop", "feed", "passed")

    def __init__(self, spec: ParseSpec, meta: StreamMeta, vocab: OutputVocab) -> None:
        self._chat = ChatStream(spec, meta, vocab)
        self.can_stop = bool(spec.stop)
        self.feed = self._chat.feed  # bound once: they are called for every token
        self.passed = self._chat.passed

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._chat.stopped

    @property
    def pieces(self) -> Sequence[bytes | None] | None:
        """What chunks of running streams differ in, by token; None while this one needs feeding."""
        return self._chat.pieces

    @property
    def frame(self) -> tuple[bytes, bytes]:
        """What stands before and after a piece."""
        return self._chat.frame

    def finish(self, reason: str, plan: Plan, num_tokens: int) -> bytes:
        """The terminal event, usage included."""
        usage = Usage(
            prompt_tokens=plan.prompt_tokens,
            cached_tokens=plan.hit_tokens,
            completion_tokens=num_tokens,
            reasoning_tokens=min(self._chat.reasoning_tokens, num_tokens),
        )
        return self._chat.finish(reason, usage)
