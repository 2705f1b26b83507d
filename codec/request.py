"""What tidemill itself reads from a Chat Completions body, beside what deepseek-recipe reads.

A table says which members we read and which valid wishes no engine can fulfil yet. Members in neither table go to
recipe alone. Recipe sees the sender's own bytes; only a body with an alias that it does not know is rewritten, and
then without touching any other member, so that numbers keep their spelling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from codec import grammar
from codec.errors import invalid_request, not_served

Members = dict[str, msgspec.Raw]

MAX_USER_BYTES = 512  # of a user id; official user ids are shorter, and it becomes part of every block key's root
MAX_CHOICES = 8  # each is a sequence of its own from the first token on. Source: ours
MAX_STOP_CHARS = 256  # of one stop string: bounds the automaton (codec/stops.py)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _Function(msgspec.Struct):
    strict: bool | None = None


class _Tool(msgspec.Struct):
    function: _Function | None = None


class _Schema(msgspec.Struct):
    schema: Any = None


class _Format(msgspec.Struct):
    type: str = "text"
    json_schema: _Schema | None = None
    regex: str | None = None


class _Role(msgspec.Struct):
    role: str = ""


class _Read(msgspec.Struct):
    """The members we read; null means absent."""

    model: str | None = None
    stream_options: _StreamOptions | None = None
    user_id: str | None = None
    user: str | None = None
    metadata: _Metadata | None = None
    tools: list[_Tool] | None = None
    response_format: _Format | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


# member -> values that wish for nothing. Any other value is refused, because an answer that ignores it would look like
# one that obeys. (Penalties are in no table: the official service checks their range and ignores them, as recipe does.)
_UNSERVED: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": (),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    "chat_template_kwargs": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
_READ_DECODERS = {
    field.name: msgspec.json.Decoder(field.type) for field in msgspec.structs.fields(_Read)
}  # for the error that names the member
_FORMAT = "response_format"
_ABSENT = msgspec.Raw()
_Body = msgspec.defstruct(
    "_Body",
    [("messages", msgspec.Raw, _ABSENT), *((name, msgspec.Raw, _ABSENT) for name in _UNSERVED)],
    bases=(_Read,),
)
_BODY: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Body)  # all of a body that we look at, in one pass
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_MEMBERS: msgspec.json.Decoder[Members] = msgspec.json.Decoder(Members)
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_ROLE = msgspec.json.Decoder(_Role)
_TOO_DEEP = "is nested too deeply"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFields:
    """Our own members, checked. `sent` is the sender's body, `body` what recipe is given."""

    read: _Read  # a _Body: the members of `_UNSERVED` are there too, empty when absent
    sent: bytes
    body: bytes
    model: str
    salt_user: str

    @property
    def members(self) -> Members:
        """All members as they were sent."""
        return _split(self.sent)

    @property
    def include_usage(self) -> bool:
        """Whether a null `usage` is wanted on every chunk but the last, as OpenAI does it."""
        options = self.read.stream_options
        return bool(options and options.include_usage)

    @property
    def ignore_eos(self) -> bool:
        """An extension: load generators and benches need answers of a fixed length."""
        return bool(self.read.ignore_eos)

    @property
    def num_choices(self) -> int:
        """Answers wanted, 1 to MAX_CHOICES. Raises CodecError 400 for any other number."""
        wanted = 1 if self.read.n is None else self.read.n
        if not 1 <= wanted <= MAX_CHOICES:
            raise invalid_request(f"n: must be 1 to {MAX_CHOICES}, not {wanted}", "n")
        return wanted

    @property
    def has_tools(self) -> bool:
        """Whether the request declares any tool."""
        return bool(self.read.tools)


def read_chat(body: bytes) -> ChatFields:
    """Our members of a body. Raises CodecError 400 for anything but a JSON object with members of the right types."""
    try:
        read = _BODY.decode(body)
    except (msgspec.DecodeError, RecursionError):
        read = _read_one_by_one(body)
    if read.model is None:
        raise invalid_request("model: missing", "model")
    return ChatFields(read=read, sent=body, body=_rewritten(body, read), model=read.model, salt_user=_salt_user(read))


def refuse_unserved(fields: ChatFields) -> None:
    """Raise CodecError 400 for the first valid wish that nothing here can fulfil.

    It runs after recipe's validation, whose messages are the official ones.
    """
    wishes = msgspec.structs.astuple(fields.read)[-len(_UNSERVED) :]
    if wishes.count(_ABSENT) < len(_UNSERVED):  # one pass in C: nearly every body has none of them
        for (name, nothing), raw in zip(_UNSERVED.items(), wishes, strict=True):
            value = _decode(name, raw, _ANY) if raw else None
            if value is not None and value not in nothing:
                raise not_served(name, _shown(raw))
    if any(tool.function and tool.function.strict for tool in fields.read.tools or ()):
        raise not_served("tools", "strict: true")


def answer_constraint(fields: ChatFields, *, in_reasoning: bool) -> str:
    """What the answer must be, as the text that an engine compiles; '' when it is free.

    in_reasoning: whether the answer begins with reasoning, which stays free. Raises CodecError 400 naming the member.
    """
    wanted = fields.read.response_format
    if wanted is None or wanted.type == "text":
        return ""
    if fields.ignore_eos:
        raise invalid_request("ignore_eos: an answer with a format ends where the format does", "ignore_eos")
    if fields.has_tools:
        raise not_served("response_format", f"type {wanted.type} together with tools")
    match wanted.type:
        case "json_object":
            made = grammar.json_object(after_think=in_reasoning)
        case "json_schema":
            schema = wanted.json_schema.schema if wanted.json_schema else None
            made = grammar.json_schema(schema, after_think=in_reasoning, param=f"{_FORMAT}.json_schema.schema")
        case "regex":
            made = grammar.regex(wanted.regex or "", after_think=in_reasoning, param=f"{_FORMAT}.regex")
        case _:
            raise not_served(_FORMAT, f"type {wanted.type}")
    return made.text()


def check_stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    """The stop strings, each once. Raises CodecError 400 for one that is too long (recipe checks all else)."""
    for index, stop in enumerate(stops):
        if len(stop) > MAX_STOP_CHARS:
            raise invalid_request(f"stop[{index}]: {len(stop)} characters, the limit is {MAX_STOP_CHARS}", "stop")
    return tuple(dict.fromkeys(stops))


def split_list(raw: msgspec.Raw) -> list[msgspec.Raw]:
    """The elements of a JSON list; empty when it is none."""
    try:
        return _RAW_LIST.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return []


def _split(body: bytes) -> Members:
    try:
        return _MEMBERS.decode(body)
    except msgspec.ValidationError:
        raise invalid_request("the body must be a JSON object") from None
    except msgspec.DecodeError as error:
        raise invalid_request(f"the body is not valid JSON: {error}") from error
    except RecursionError:  # msgspec's own bound, below the interpreter's
        raise invalid_request(f"the body {_TOO_DEEP}") from None


def _decode(name: str, raw: msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:  # "Expected `bool | null`, got `str` - at `$.include_usage`"
        raise invalid_request(f"{name}: {str(error).replace('$', name)}", name) from error
    except RecursionError:
        raise invalid_request(f"{name}: {_TOO_DEEP}", name) from None


def _read_one_by_one(body: bytes) -> Any:
    """The same, member by member, so that an error names the one that is wrong. Raises CodecError 400."""
    members, read = _split(body), _Body()
    for name, decoder in _READ_DECODERS.items():
        if name in members:
            setattr(read, name, _decode(name, members[name], decoder))
    for name in ("messages", *_UNSERVED):
        if name in members:
            setattr(read, name, members[name])
    return read


def _salt_user(read: _Read) -> str:
    """The end user's id: DeepSeek's field, then OpenAI's, then Anthropic's."""
    metadata = read.metadata
    candidates = {"user_id": read.user_id, "user": read.user, "metadata": metadata and metadata.user_id}
    for name, user in candidates.items():
        if user:
            if (size := len(user.encode())) > MAX_USER_BYTES:
                raise invalid_request(f"{name}: a user id of {size} bytes, the limit is {MAX_USER_BYTES}", name)
            return user
    return ""


def _rewritten(body: bytes, read: Any) -> bytes:
    """The body without the two aliases and the member that recipe does not know; almost always the very same bytes."""
    changed: dict[str, msgspec.Raw] = {}
    if (limit := read.max_completion_tokens) is not None:
        if read.max_tokens not in {None, limit}:
            raise invalid_request("max_completion_tokens and max_tokens contradict each other", "max_completion_tokens")
        changed["max_tokens"] = msgspec.Raw(b"%d" % limit)
    if b'"developer"' in memoryview(read.messages).tobytes():
        changed["messages"] = msgspec.Raw(msgspec.json.encode([_as_system(raw) for raw in split_list(read.messages)]))
    if read.n is not None:
        changed["n"] = msgspec.Raw(b"1")  # recipe knows one answer; ours is `ChatFields.num_choices`
    return msgspec.json.encode(_split(body) | changed) if changed else body


def _as_system(message: msgspec.Raw) -> msgspec.Raw:
    """OpenAI's newer name of the system role; V4.1 has one role for both. Any other message is returned as it is."""
    try:
        if _ROLE.decode(message).role != "developer":
            return message
    except (msgspec.DecodeError, RecursionError):
        return message  # recipe will say what is wrong with it
    return msgspec.Raw(msgspec.json.encode(_MEMBERS.decode(message) | {"role": msgspec.Raw(b'"system"')}))


def _shown(raw: msgspec.Raw) -> str:
    text = memoryview(raw).tobytes().decode(errors="replace")
    return text if len(text) <= 40 else f"{text[:40]}…"
