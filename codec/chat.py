"""One choice's tokens -> Chat Completions JSON: at most one chunk per token, a pure function of the tokens.

A stream started again on the same tokens yields the same bytes, so events can be derived anew instead of being kept.
Text is the UTF-8 decoding of all text tokens' bytes in a row, invalid bytes at once replaced by U+FFFD, whatever the
tokens' borders: a model with random weights emits such bytes all the time. Control tokens add no text.
Source: facts-codec (stream semantics), ours (numbering).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from codec.models import ParseSpec, StreamMeta, Usage
from codec.stops import StopMatcher
from codec.vocab import THINK_END_ID, OutputVocab, escape

CONTENT = "content"
REASONING = "reasoning_content"

_Utf8 = codecs.getincrementaldecoder("utf-8")


class ChatStream:
    """One choice's answer.

    The common token (whole characters, nothing held back) costs a list look-up and a concatenation. `_fragments` is
    that list: `vocab.fragments` while nothing needs a closer look, else the empty one, which leads to the slow path.

    Attributes: `num_tokens` fed so far, not counting any after a stop string; `stopped`, True once a stop string is
    complete in the content (never in the reasoning); the caller then ends the choice.
    """

    __slots__ = (
        "_fields",
        "_fragments",
        "_head",
        "_in_reasoning",
        "_matcher",
        "_meta",
        "_reasoning_tokens",
        "_role_due",
        "_spec",
        "_strip",
        "_tail",
        "_utf8",
        "_vocab",
        "num_tokens",
        "stopped",
    )

    def __init__(self, spec: ParseSpec, meta: StreamMeta, vocab: OutputVocab) -> None:
        self._spec = spec
        self._meta = meta
        self._vocab = vocab
        self._utf8 = _Utf8("replace")
        self._matcher = StopMatcher(spec.stop) if spec.stop else None
        self._in_reasoning = spec.start.in_reasoning
        self._strip = spec.start.is_fresh
        self._role_due = True
        self._fields: dict[str, list[str]] = {REASONING: [], CONTENT: []}  # of a whole answer only
        self._reasoning_tokens = 0
        self.num_tokens = 0
        self.stopped = False
        self._head, self._tail = self._frame()
        self._fragments = vocab.no_fragments

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its closing token not counted."""
        return self.num_tokens if self._in_reasoning else self._reasoning_tokens

    def feed(self, token_id: int) -> bytes | None:
        """The chunk that this token caused, None when it caused none. Raises ValueError for a foreign id."""
        try:
            fragment = self._fragments[token_id]
        except IndexError:
            fragment = None
        if fragment is None:
            return self._feed_slowly(token_id)
        self.num_tokens += 1
        return self._head + fragment + self._tail

    @property
    def pieces(self) -> Sequence[bytes | None] | None:
        """Texts by token as they stand inside the chunks that `feed` would give, between the two parts of `frame`.

        None while the next chunk may be of another form. An entry that is None says: `feed` this token. Whoever makes
        chunks of pieces tells it with `passed`; the table and the frame hold until the next `feed`.
        """
        return self._fragments or None

    def passed(self, num_tokens: int) -> None:
        """So many tokens became chunks through `pieces`."""
        self.num_tokens += num_tokens

    @property
    def frame(self) -> tuple[bytes, bytes]:
        """What stands before and after a piece; only `feed` may change it."""
        return self._head, self._tail

    def finish(self, reason: str, usage: Usage) -> bytes:
        """The last chunk, or the whole answer when not streaming. Changes nothing: a repeat gives the same bytes."""
        rest = self._rest()
        if self._spec.stream:
            return msgspec.json.encode(self._last_chunk(rest, reason, usage))
        return msgspec.json.encode(self._answer(rest, reason, usage))

    def _feed_slowly(self, token_id: int) -> bytes | None:
        token_bytes = self._vocab.token_bytes(token_id)
        if self.stopped:
            return None  # sampled before the engine learnt of the stop: waste
        self.num_tokens += 1
        chunk = None
        if token_id == THINK_END_ID and self._in_reasoning:
            chunk = self._close_reasoning()
        elif token_id not in self._vocab.hidden_ids:
            chunk = self._add(self._utf8.decode(token_bytes))
            self._vocab.learn(token_id)
        self._choose_path()
        return chunk

    def _choose_path(self) -> None:
        slow = self._strip or self._role_due or bool(self._utf8.getstate()[0])
        stops = self._matcher is not None and not self._in_reasoning
        self._fragments = self._vocab.no_fragments if slow or stops or self.stopped else self._vocab.fragments

    def _close_reasoning(self) -> bytes | None:
        chunk = self._emit(self._utf8.decode(b"", final=True))
        self._reasoning_tokens = self.num_tokens - 1
        self._in_reasoning = False
        self._strip = True
        self._head, self._tail = self._frame()
        return chunk

    def _add(self, text: str) -> bytes | None:
        if self._strip:
            text = text.lstrip("\n")
            self._strip = not text
        if self._matcher is not None and not self._in_reasoning:
            text = self._matcher.feed(text)
            self.stopped = self._matcher.found
        return self._emit(text)

    def _emit(self, text: str) -> bytes | None:
        if not text:
            return None
        if not self._spec.stream:
            self._fields[self._field].append(text)
            return None
        chunk = self._head + escape(text) + self._tail
        if self._role_due:
            self._role_due = False
            self._head, self._tail = self._frame()
        return chunk

    def _rest(self) -> str:
        """What is still held back: text that might have become a stop string, and the bytes of half a character."""
        if self.stopped:
            return ""
        held = self._matcher.held if self._matcher is not None else ""
        return held + self._utf8.getstate()[0].decode(errors="replace")

    @property
    def _field(self) -> str:
        return REASONING if self._in_reasoning else CONTENT

    def _frame(self) -> tuple[bytes, bytes]:
        """What stands before and after a chunk's text."""
        mark = "@"  # the only text of the sample chunk, so its last occurrence is the text's place
        delta = {"role": "assistant", self._field: mark} if self._role_due else {self._field: mark}
        usage: dict[str, object] = {"usage": None} if self._spec.include_usage else {}
        head, _, tail = msgspec.json.encode(self._chunk(delta, None) | usage).rpartition(mark.encode())
        return head, tail

    def _last_chunk(self, rest: str, reason: str, usage: Usage) -> dict[str, object]:
        delta = {"role": "assistant", CONTENT: ""} if self._role_due else {}
        if rest:
            delta[self._field] = rest
        return self._chunk(delta, reason) | {"usage": usage.as_dict()}

    def _chunk(self, delta: dict[str, str], reason: str | None) -> dict[str, object]:
        choice = {"index": self._meta.choice, "delta": delta, "finish_reason": reason}
        return self._envelope("chat.completion.chunk") | {"choices": [choice]}

    def _answer(self, rest: str, reason: str, usage: Usage) -> dict[str, object]:
        texts = {field: "".join(parts) for field, parts in self._fields.items()}
        texts[self._field] += rest
        message: dict[str, object] = {"role": "assistant", CONTENT: texts[CONTENT]}
        if texts[REASONING]:
            message[REASONING] = texts[REASONING]
        choice = {"index": self._meta.choice, "message": message, "logprobs": None, "finish_reason": reason}
        return self._envelope("chat.completion") | {"choices": [choice], "usage": usage.as_dict()}

    def _envelope(self, kind: str) -> dict[str, object]:
        meta = self._meta
        return {"id": f"chatcmpl-{meta.rid}", "object": kind, "created": meta.created, "model": meta.model}
