"""What the codec hands over: an encoded prompt, and what is needed to turn its answer back into text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class StreamStart(StrEnum):
    """Where the rendered prompt leaves the model: in which field its first token lands. Source: facts-codec."""

    REASONING = "reasoning"  # after <think>: leading newlines are dropped
    REASONING_CONTINUED = "reasoning_continued"  # amid a prefix message's reasoning
    CONTENT = "content"  # after </think>: leading newlines are dropped
    CONTENT_CONTINUED = "content_continued"  # amid a prefix message's content

    @property
    def in_reasoning(self) -> bool:
        """Whether the answer starts inside the reasoning."""
        return self in {StreamStart.REASONING, StreamStart.REASONING_CONTINUED}

    @property
    def is_fresh(self) -> bool:
        """Whether the field starts empty, so that newlines before its first text carry nothing."""
        return self in {StreamStart.REASONING, StreamStart.CONTENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseSpec:
    """How one choice's tokens become events: plain data, so that any process can derive the same events again."""

    stream: bool
    start: StreamStart
    include_usage: bool = False
    stop: tuple[str, ...] = ()  # never empty strings, at most 16
    has_tools: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """The request's sampling wishes after validation, with the protocol's defaults filled in."""

    max_tokens: int  # >= 1; 0 when the prompt is too long for any
    temperature: float
    top_p: float
    top_k: int = 0  # 0 = off
    seed: int | None = None  # [0, 2^63)
    num_choices: int = 1
    ignore_eos: bool = False
    top_logprobs: int = -1  # -1 = none wanted
    grammar: str = ""  # what the answer must be, as the text of codec.grammar; '' = free


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A Chat Completions body as token ids.

    ids: [n] u32, read-only. `too_long` means n > `max_context_tokens`: a finish reason, not an error, so the pipeline
    ends the request. `salt_user` (<= 512 bytes, may be empty) separates the prefix caches of a tenant's users.
    """

    ids: npt.NDArray[np.uint32]
    model: str  # as requested
    sampling: SamplingSpec
    parse: ParseSpec
    salt_user: str
    max_context_tokens: int
    too_long: bool

    @property
    def num_prompt_tokens(self) -> int:
        """n, what usage reports as `prompt_tokens`."""
        return len(self.ids)

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings: found by parse, not by the engine."""
        return self.parse.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMeta:
    """What every chunk of one choice repeats. `created`: Unix seconds, of the request, so that replays are equal."""

    rid: str
    created: int
    model: str
    choice: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a finished request. Raises ValueError when a part is larger than its whole."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise ValueError(f"{self.cached_tokens} cached tokens of {self.prompt_tokens} prompt tokens")
        if not 0 <= self.reasoning_tokens <= self.completion_tokens:
            raise ValueError(f"{self.reasoning_tokens} reasoning tokens of {self.completion_tokens} completion tokens")

    def as_dict(self) -> dict[str, object]:
        """The `usage` object. Source: facts-codec (members of the official API)."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
