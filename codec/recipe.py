"""The official request validation and prompt template: the only importer of deepseek-recipe.

Pinned to 0.2.0: names and behaviour changed with every minor version. Its tokenizer and its output parser are not
used. None of its objects leaves this file. Source: facts-codec (object flow, conversion rules).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import deepseek_recipe as recipe
import msgspec

from codec.errors import CodecError, invalid_request
from codec.models import StreamStart
from codec.request import ChatFields, Members, split_list

PINNED = "0.2.0"

# model version name -> recipe's
_VERSIONS = {
    "DeepSeek-V4.1-Flash": recipe.ModelVersion.DeepseekV41Flash,
    "DeepSeek-V4-Pro": recipe.ModelVersion.DeepseekV4Pro,
}


class _Envelope(msgspec.Struct):
    class Error(msgspec.Struct):
        message: str

    error: Error


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A validated body as prompt text, with what it asks of sampling and parsing.

    `control_ranges`: ascending (start, end) in code points of `prompt`, one control token each.
    """

    prompt: str
    control_ranges: list[tuple[int, int]]
    has_images: bool
    stream: bool
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    start: StreamStart
    request: recipe.ConversationRequest  # for resolve_max_tokens only


class ChatRecipe:
    """Convert and render Chat Completions bodies. Stateless after construction; releases the GIL while it works."""

    def __init__(self, models: Mapping[str, str]) -> None:
        """Take `models`, request's model name -> model version. Raises ValueError for an unknown version."""
        if recipe.__version__ != PINNED:
            raise ValueError(f"deepseek-recipe {PINNED} is needed, {recipe.__version__} is installed")
        if unknown := set(models.values()) - _VERSIONS.keys():
            raise ValueError(f"unknown model versions {sorted(unknown)}; known: {sorted(_VERSIONS)}")
        versions = {name: _VERSIONS[version] for name, version in models.items()}
        self._options = recipe.ConversionOptions().with_model_versions_by_name(versions)
        self._any_model = next(iter(models), "")
        self._v41 = recipe.DeepseekV41Encoding()
        self._v4 = recipe.DeepseekV4Encoding()

    def render(self, fields: ChatFields) -> RenderedChat:
        """The prompt of a body whose model is known. Raises CodecError 400 naming the field that is wrong."""
        try:
            request = recipe.ChatCompletionRequest(fields.body).convert(self._options)
        except recipe.ConversionError as error:
            raise _official(error) from error
        except ValueError as error:  # wrong types: recipe says what it expected, but not where
            raise self._blamed(fields.members, str(error)) from error
        is_v4 = request.model_version == recipe.ModelVersion.DeepseekV4Pro
        rendered = (self._v4 if is_v4 else self._v41).render_conversation(request.conversation)
        prompt, ranges = rendered.prompt, rendered.special_ranges
        inference, parsing = request.inference_options, request.parsing_options
        return RenderedChat(
            prompt=prompt,
            control_ranges=ranges,
            has_images=bool(rendered.image_sources),
            stream=request.stream,
            temperature=_decimal(inference.temperature),
            top_p=_decimal(inference.top_p),
            seed=inference.seed,
            stop=tuple(parsing.stop_sequences),
            start=_start(parsing.thinking_initial_stage, ends_in_control=ranges[-1][1] == len(prompt)),
            request=request,
        )

    def _blamed(self, members: Members, message: str) -> CodecError:
        """The error with the member that causes it, found by trying each alone in a body that is otherwise right."""
        if not message.startswith("invalid JSON"):  # that one names line and column of the real body
            for name, raw in members.items():
                if name == "messages":
                    for index, one in enumerate(split_list(raw)):
                        if reason := self._refusal({"messages": msgspec.Raw(b"[%b]" % memoryview(one).tobytes())}):
                            return invalid_request(f"messages[{index}]: {reason}", f"messages[{index}]")
                if reason := self._refusal({name: raw}):
                    return invalid_request(f"{name}: {reason}", name)
        return invalid_request(message)

    def _refusal(self, members: Members) -> str:
        right = {
            "model": msgspec.Raw(msgspec.json.encode(self._any_model)),
            "messages": msgspec.Raw(b'[{"role":"user","content":"x"}]'),
        }
        try:
            recipe.ChatCompletionRequest(msgspec.json.encode(right | members))
        except ValueError as error:
            return str(error).removeprefix("invalid request body: ")
        return ""


def resolve_max_tokens(chat: RenderedChat, num_prompt_tokens: int, max_context_tokens: int) -> int:
    """The tokens to generate at most: as requested, or the official default lowered to the context that is left.

    Raises CodecError 400 when prompt and requested tokens together exceed the context.
    """
    try:
        return chat.request.resolve_max_tokens(num_prompt_tokens, max_context_tokens)
    except recipe.ConversionError as error:
        raise _official(error, "max_tokens") from error


def _official(error: recipe.ConversionError, param: str | None = None) -> CodecError:
    message = msgspec.json.decode(error.body, type=_Envelope).error.message
    return CodecError(status=error.status_code, code="invalid_request", message=message, param=param)


def _decimal(value: float | None) -> float:
    """Recipe's 32-bit float as the decimal that was sent (0.3, not 0.30000001192); unset means the official 1.0."""
    return 1.0 if value is None else float(f"{value:.7g}")


def _start(stage: recipe.ThinkingInitialStage | None, *, ends_in_control: bool) -> StreamStart:
    if stage is None:  # not thinking; a prefix message leaves its own text at the end
        return StreamStart.CONTENT if ends_in_control else StreamStart.CONTENT_CONTINUED
    if stage == recipe.ThinkingInitialStage.ReasoningStart:
        return StreamStart.REASONING
    if stage == recipe.ThinkingInitialStage.ReasoningContinuation:
        return StreamStart.REASONING_CONTINUED
    return StreamStart.CONTENT_CONTINUED
