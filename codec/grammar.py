"""What an answer must look like: as one compact text that travels with the request, and as a grammar.

A `Constraint` says it in the request's own words. `Constraint.text()` is its JSON for `Sampling.grammar`, equal on
every machine. `grammar_of` is the same in the Lark dialect of llguidance 1.9, which the engine compiles.

Tool calls, as the model was trained on them; D is the control token DSML, never its letters:

    <D calls>
    <D invoke name="f">
    <D parameter name="k" string="true">raw text</D parameter>
    <D parameter name="n" string="false">[1, 2]</D parameter>
    </D invoke>
    </D calls>

Strings are raw, all else is JSON; a call without parameters has an empty line instead. A forced tool call keeps to its
tool's schema in the order of `properties`, and gives only parameters that are declared there.
Source: facts-codec 4 (DSML, compared with what deepseek-recipe 0.2.0 renders), facts-spikes 2; the limits are ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from codec.errors import CodecError, invalid_request
from codec.vocab import DSML_ID

VERSION = 1
MAX_TEXT_BYTES = 131_072  # of a constraint's text: with the ids (128 KiB inline) it stays below the bus's 1 MiB
MAX_DEPTH = 100  # levels of JSON in a schema; the library's reader stops at 128, and a grammar adds a few
MAX_TOOLS = 128  # Source: facts-codec 8 (official)
MAX_STRING_CHARS = 1_000_000  # of minLength and maxLength: far below where a regex's counters overflow
MAX_GRAMMAR_CHARS = 1_048_576  # of tool calls: references let a short schema unfold without an end

Schema = dict[str, Any] | bool

# Every token that fits is allowed, not only the official spelling of a stretch that has no alternative: a mask then
# says exactly what text may follow, and no second tokenizer is involved.
_HEADER = '%llguidance {"no_forcing": true}\n'
# As json.dumps writes and as the model was trained; free whitespace would let an answer be blanks for ever.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_D = f"<[{DSML_ID}]>"


class Kind(StrEnum):
    """What a constraint is written in."""

    REGEX = "regex"  # the whole answer matches; Rust's syntax without look-around and back-references
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    LARK = "lark"  # context-free, as llguidance reads it
    TOOL_CALLS = "tool_calls"


class ToolChoice(StrEnum):
    """Whether the answer is text, text and then calls if the model wants, or calls alone."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class Tool(msgspec.Struct, frozen=True):
    """A function that may be called. `parameters`: its arguments' JSON schema, of type object."""

    name: str
    parameters: Schema


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checked constraint; made by the functions below.

    `after_think`: the answer starts in reasoning, which is free, and the constraint holds from `</think>` on.
    `source`: of a regex or a Lark grammar. `opened`: the prompt already ends in the line that opens the block of calls.
    `parallel`: more than one call may be made.
    """

    kind: Kind
    v: int = 0  # always VERSION; the default differs so that it is written
    after_think: bool = False
    source: str = ""
    schema: Schema = True
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice.REQUIRED
    opened: bool = False
    parallel: bool = True

    def text(self) -> str:
        """ASCII JSON, at most MAX_TEXT_BYTES. The members of schemas keep their order: it is the answer's."""
        return _json(msgspec.to_builtins(self), separators=(",", ":"))


def regex(source: str, *, after_think: bool = False, param: str = "regex") -> Constraint:
    """The answer matches `source` as a whole. Raises CodecError 400 naming `param` when it is empty or too long.

    Whether the engine can compile it shows there.
    """
    return _checked(Constraint(kind=Kind.REGEX, v=VERSION, source=source, after_think=after_think), param)


def json_schema(schema: object, *, after_think: bool = False, param: str = "schema") -> Constraint:
    """The answer is JSON that fits a decoded schema. Raises CodecError 400 naming `param` when it is no schema.

    Keywords that the engine does not know are found there: they are refused by name, never ignored.
    """
    if (checked := _schema(schema, param)) is False:
        raise _refused(param, "no answer fits a schema that is false")
    return _checked(Constraint(kind=Kind.JSON_SCHEMA, v=VERSION, schema=checked, after_think=after_think), param)


def json_object(*, after_think: bool = False) -> Constraint:
    """The answer is any JSON object."""
    return Constraint(kind=Kind.JSON_OBJECT, v=VERSION, after_think=after_think)


def lark(source: str, *, after_think: bool = False, param: str = "grammar") -> Constraint:
    """The answer fits a context-free grammar with a rule `start`. Raises CodecError 400 naming `param`."""
    if "%llguidance" in source:
        raise _refused(param, "%llguidance sets options of the engine, which a request may not")
    return _checked(Constraint(kind=Kind.LARK, v=VERSION, source=source, after_think=after_think), param)


def tool_calls(
    tools: Sequence[tuple[str, object]],
    *,
    choice: ToolChoice = ToolChoice.REQUIRED,
    named: str = "",
    opened: bool = False,
    parallel: bool = True,
    after_think: bool = False,
) -> Constraint:
    """The answer calls `tools`, pairs of a name and the decoded schema of its arguments (None: no arguments).

    `named` leaves only that tool. Raises CodecError 400 naming the tool's or the schema's place, also for a schema of
    arguments that cannot be kept to where strings are raw. `format` of a raw string is taken as a remark.
    """
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise invalid_request(f"tools: {len(tools)} of them, from 1 to {MAX_TOOLS} are possible", "tools")
    if opened and (after_think or choice is not ToolChoice.REQUIRED):
        raise invalid_request("tools: only a prompt that forces calls without reasoning opens their block", "tools")
    checked = [_tool(name, schema, f"tools[{index}]") for index, (name, schema) in enumerate(tools)]
    wanted = tuple(tool for tool in checked if tool.name == named or not named)
    if not wanted:
        raise invalid_request(f"tool_choice: no tool is named {_shown(named)}", "tool_choice")
    made = Constraint(
        kind=Kind.TOOL_CALLS, v=VERSION, tools=wanted, choice=choice, opened=opened, parallel=parallel,
        after_think=after_think,
    )  # fmt: skip
    return _checked(made, "tools")


def constraint_of(text: str) -> Constraint:
    """The constraint that `text` says, checked again. Raises CodecError 400 naming `grammar`."""
    if len(text) > MAX_TEXT_BYTES:
        raise _too_long(len(text), "grammar")
    try:
        read = msgspec.convert(json.loads(text, parse_constant=_no_json), Constraint)
    except (ValueError, RecursionError) as error:  # msgspec's and json's errors are ValueErrors
        raise invalid_request(f"grammar: not a constraint: {error}", "grammar") from error
    if read.v != VERSION:
        raise invalid_request(f"grammar: version {read.v}, known is {VERSION}", "grammar")
    return _made_again(read)


def grammar_of(constraint: Constraint) -> str:
    """The Lark grammar of a constraint, for llguidance. Raises CodecError 400 as `tool_calls` does."""
    match constraint.kind:
        case Kind.REGEX:
            return f"{_HEADER}start: /{_lark_regex(constraint.source)}/\n"
        case Kind.JSON_SCHEMA:
            return f"{_HEADER}start: {_lark_json(constraint.schema)}\n"
        case Kind.JSON_OBJECT:
            return f"{_HEADER}start: {_lark_json({'type': 'object'})}\n"
        case Kind.LARK:
            return _HEADER + constraint.source
        case Kind.TOOL_CALLS:
            return _tool_grammar(constraint)


def _made_again(read: Constraint) -> Constraint:
    think = read.after_think
    match read.kind:
        case Kind.REGEX:
            return regex(read.source, after_think=think, param="grammar")
        case Kind.JSON_SCHEMA:
            return json_schema(read.schema, after_think=think, param="grammar")
        case Kind.JSON_OBJECT:
            return json_object(after_think=think)
        case Kind.LARK:
            return lark(read.source, after_think=think, param="grammar")
        case Kind.TOOL_CALLS:
            return tool_calls(
                [(tool.name, tool.parameters) for tool in read.tools],
                choice=read.choice, opened=read.opened, parallel=read.parallel, after_think=think,
            )  # fmt: skip


def _checked(made: Constraint, param: str) -> Constraint:
    if made.kind in {Kind.REGEX, Kind.LARK} and not made.source:
        raise _refused(param, "empty")
    if (size := len(made.text())) > MAX_TEXT_BYTES:
        raise _too_long(size, param)
    try:
        grammar_of(made).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise _refused(param, "not Unicode text") from error
    return made


def _too_long(size: int, param: str) -> CodecError:
    return _refused(param, f"a constraint of {size} bytes, the limit is {MAX_TEXT_BYTES}")


def _no_json(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def _refused(place: str, reason: str) -> CodecError:
    return invalid_request(f"{place}: {reason}", place)


def _schema(schema: object, param: str) -> Schema:
    if not isinstance(schema, dict | bool):
        raise _refused(param, "a JSON schema is an object, true or false")
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise _refused(param, f"nested deeper than {MAX_DEPTH} levels")
    try:
        _json(schema)
    except (TypeError, ValueError) as error:
        raise _refused(param, f"not JSON: {error}") from error
    return schema


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _json(value: object, separators: tuple[str, str] | None = None) -> str:
    return json.dumps(value, separators=separators, allow_nan=False)


def _shown(name: object) -> str:
    return ascii(name)[:80]


# What the grammars are made of.

_REGEX_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # an escape, a whole class or one character
_ASCII_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}  # as JSON Schema's


def _lark_json(schema: Schema) -> str:
    return "%json " + _json({**(schema if isinstance(schema, dict) else {}), "x-guidance": _STYLE})


def _lark_regex(source: str) -> str:
    """The inside of a /regex/: its delimiter escaped, its line ends spelled."""
    return re.sub(r"\\.|[/\n\r]", _lark_escape, source, flags=re.DOTALL)


def _lark_escape(match: re.Match[str]) -> str:
    found = match.group()
    return {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}.get(found, found)


def _found_by(pattern: str) -> str:
    """A regex for whole texts in which a JSON Schema `pattern` is found."""
    found = []
    for part in _alternatives(pattern):
        open_start, open_end = not part.startswith("^"), not _ends_in_anchor(part)
        core = part[0 if open_start else 1 : None if open_end else -1]
        found.append(f"{'(?s:.*)' * open_start}(?:{core}){'(?s:.*)' * open_end}")
    return "(?:" + "|".join(found) + ")"


def _alternatives(pattern: str) -> Iterator[str]:
    """The parts between the `|` that are in no group, with ASCII classes."""
    depth, part = 0, ""
    for piece in _REGEX_PART.findall(pattern):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        if piece == "|" and depth == 0:
            yield part
            part = ""
        else:
            part += re.sub(r"\\.", lambda m: _ASCII_CLASSES.get(m.group(), m.group()), piece, flags=re.DOTALL)
    yield part


def _ends_in_anchor(part: str) -> bool:
    return bool(pieces := _REGEX_PART.findall(part)) and pieces[-1] == "$"


# Tool calls. A form is what may stand between `string="` and ` parameter>`, as Lark.

_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$defs",
    "definitions", "$schema", "$id", "format", "contentEncoding", "contentMediaType",
})  # fmt: skip
_OTHER_TYPES = ("null", "boolean", "integer", "number", "array", "object")
_STRING_KEYWORDS = ("pattern", "minLength", "maxLength")
# Of the arguments as a whole: no sequence of parameters in a fixed order can keep to these.
_WHOLE_KEYWORDS = frozenset({
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies", "enum",
    "const", "minProperties", "maxProperties", "propertyNames", "patternProperties",
})  # fmt: skip
# Of a parameter that may be a string: a raw string cannot keep to these.
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef"})
_MAX_REFS = 32  # references and alternatives inside each other, before one is called endless


def _tool(name: object, schema: object, param: str) -> Tool:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", name):  # Source: facts-codec 8
        raise _refused(f"{param}.function.name", f"{_shown(name)} is not a function's name")
    place = f"{param}.function.parameters"
    checked = _schema({} if schema is None else schema, place)
    if checked is False or (checked is not True and checked.get("type", "object") != "object"):
        raise _refused(place, "the arguments' schema must have type object")
    return Tool(name, checked)


def _tool_grammar(constraint: Constraint) -> str:
    room = _Room()
    rules = [_HEADER + f"start: {_START[constraint.choice, constraint.opened]}"]
    if constraint.choice is ToolChoice.NONE:
        return f"{rules[0]}\n{_TEXT}"
    rules.append(f'block: {"call+" if constraint.parallel else "call"} "</" {_D} " calls>"')
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(constraint.tools))))
    for index, tool in enumerate(constraint.tools):
        opening = _json(f' invoke name="{tool.name}">\n')
        rules.append(f'call_{index}: "<" {_D} {opening} none_{index}_0 "</" {_D} " invoke>\\n"')
        rules += _ToolRules(index, tool, f"tools[{index}].function.parameters", room).rules()
    return "\n".join([*rules, _TEXT])


_OPENING = f'"\\n\\n<" {_D} " calls>\\n" block'
_START = {
    (ToolChoice.NONE, False): "TEXT",
    (ToolChoice.AUTO, False): f'TEXT | BEFORE_CALLS {_D} " calls>\\n" block',
    (ToolChoice.REQUIRED, False): _OPENING,
    (ToolChoice.REQUIRED, True): "block",
}
_TEXT = r"""TEXT: /(?s:.*)/
BEFORE_CALLS: /(?s:.*)\n\n</
"""


@dataclass(slots=True)
class _Room:
    """What is left of MAX_GRAMMAR_CHARS."""

    left: int = MAX_GRAMMAR_CHARS

    def take(self, num_chars: int) -> None:
        """Raises CodecError 400 when there is not so much left."""
        self.left -= num_chars
        if self.left < 0:
            raise invalid_request(f"tools: their schemas unfold to more than {MAX_GRAMMAR_CHARS} characters", "tools")


@dataclass(frozen=True, slots=True)
class _ToolRules:
    """The rules for one tool's parameters. `place` names its schema in errors."""

    index: int
    tool: Tool
    place: str
    room: _Room

    def rules(self) -> list[str]:
        """`none_i_k`: what may follow when no parameter before the k-th was given; `some_i_k`: when one was."""
        required, properties = self._declared()
        rules, i = list[str](), self.index
        for k, (name, schema) in enumerate(properties.items()):
            place = f"{self.place}.properties.{name}"
            forms = _Forms(self.tool.parameters, place, self.room)
            forms.read(schema)
            values, terminals = forms.lark(f"{i}_{k}")
            if not values and name in required:
                raise _refused(place, "no value fits, and the parameter is required")
            for before in ("none", "some"):
                given = [f"given_{i}_{k} some_{i}_{k + 1}"] if values else []
                skipped = [] if name in required else [f"{before}_{i}_{k + 1}"]
                rules.append(f"{before}_{i}_{k}: " + " | ".join(given + skipped))
            if values:
                opening = _json(f' parameter name="{_attribute(name, place)}" string="')
                rules.append(f'given_{i}_{k}: "<" {_D} {opening} ({" | ".join(values)}) {_D} " parameter>\\n"')
                rules += terminals
        end = len(properties)
        return [*rules, f'none_{i}_{end}: "\\n"', f'some_{i}_{end}: ""']

    def _declared(self) -> tuple[frozenset[str], dict[str, object]]:
        """Names of required parameters, and all parameters' schemas in order."""
        whole = self.tool.parameters
        if isinstance(whole, bool):
            return frozenset(), {}
        if used := sorted(_WHOLE_KEYWORDS & whole.keys()):
            raise _refused(self.place, f"{used[0]} cannot be enforced for a tool's arguments")
        required, properties = whole.get("required", []), whole.get("properties", {})
        if not isinstance(properties, dict):
            raise _refused(f"{self.place}.properties", "not an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refused(f"{self.place}.required", "not a list of names")
        return frozenset(required), {**properties, **{name: True for name in required if name not in properties}}


class _Forms:
    """Collects the forms of one parameter's values.

    `strings`: bodies of Lark terminals that end in `</`; `others`: schemas of values that are no strings.
    """

    def __init__(self, whole: Schema, place: str, room: _Room) -> None:
        self.whole = whole if isinstance(whole, dict) else {}
        self.place = place
        self.room = room
        self.strings: list[str] = []
        self.others: list[Schema] = []

    def lark(self, name: str) -> tuple[list[str], list[str]]:
        """Every form as the part of a rule, and the terminals that they name."""
        values, terminals = list[str](), list[str]()
        if self.strings:
            values.append(f'"true\\">" STRING_{name}')
            terminals.append(f"STRING_{name}: " + " | ".join(self.strings))
            self.room.take(len(terminals[0]))
        for other in self.others:
            values.append(f'"false\\">" {_lark_json(self._with_definitions(other))} "</"')
            self.room.take(len(values[-1]))
        return values, terminals

    def read(self, schema: object, depth: int = 0) -> None:
        """Add the forms of `schema`. Raises CodecError 400 naming the parameter and the keyword."""
        self.room.take(64)  # reading costs time even where it adds nothing
        if depth > _MAX_REFS:
            raise self._refused("references without an end")
        if not isinstance(schema, dict | bool):
            raise self._refused("not a schema")
        if schema is False:
            return
        says = {} if schema is True else {key: schema[key] for key in schema if key not in _ANNOTATIONS}
        types = self._types(says)
        if "string" not in types:
            self.others.append(says)
        elif combined := sorted(_COMBINING & says.keys()):
            self._read_combined(says, combined[0], depth)
        elif "enum" in says or "const" in says:
            self._read_values(says, types)
        else:
            self._read_types(says, types)

    def _types(self, says: dict[str, Any]) -> tuple[str, ...]:
        types = says.get("type", ["string", *_OTHER_TYPES])
        named = tuple(types) if isinstance(types, list) else (types,)
        if unknown := [one for one in named if one != "string" and one not in _OTHER_TYPES]:
            raise self._refused(f"{_shown(unknown[0])} is not a type")
        return named

    def _read_combined(self, says: dict[str, Any], keyword: str, depth: int) -> None:
        inner = says[keyword]
        if says.keys() - {keyword}:  # both would have to hold at once
            raise self._refused(f"{keyword} beside other keywords cannot be enforced where a string is possible")
        if keyword == "$ref":
            self.read(self._target(inner), depth + 1)
        elif keyword in {"anyOf", "oneOf"} or (keyword == "allOf" and isinstance(inner, list) and len(inner) == 1):
            self._read_each(inner, keyword, depth)
        else:
            raise self._refused(f"{keyword} cannot be enforced where a string is possible")

    def _read_each(self, schemas: object, keyword: str, depth: int) -> None:
        if not isinstance(schemas, list):
            raise self._refused(f"{keyword} is not a list")
        before, others, num_raw = len(self.strings), self.others, 0
        self.others = []
        for schema in schemas:
            known = len(self.strings)
            self.read(schema, depth + 1)
            num_raw += len(self.strings) > known
        if keyword == "oneOf" and num_raw > 1:  # a string that fits two of them fits none
            raise self._refused("oneOf with more than one kind of string cannot be enforced")
        several = len(self.others) > 1 and keyword == "oneOf"
        self.others = others + ([{"oneOf": self.others}] if several else self.others)
        self.strings = self.strings[:before] + list(dict.fromkeys(self.strings[before:]))

    def _read_values(self, says: dict[str, Any], types: tuple[str, ...]) -> None:
        values = [says["const"]] if "const" in says else says["enum"]
        if says.keys() - {"enum", "const", "type"} or {"enum", "const"} <= says.keys() or not isinstance(values, list):
            raise self._refused("enum or const beside other keywords cannot be enforced where a string is possible")
        self.strings += [_json(f"{value}</") for value in values if isinstance(value, str)]
        rest = [value for value in values if not isinstance(value, str)]
        if rest and (wanted := [one for one in types if one != "string"]):
            self.others.append({"enum": rest, "type": wanted} if "type" in says else {"enum": rest})

    def _read_types(self, says: dict[str, Any], types: tuple[str, ...]) -> None:
        others = [one for one in types if one != "string"]
        about_others = says.keys() - {"type", *_STRING_KEYWORDS}
        if "type" in says or not about_others:  # `{"properties": ...}` without a type means an object
            self.strings.append(self._raw_string(says))
        if others:
            self.others.append({key: says[key] for key in says if key not in _STRING_KEYWORDS} | {"type": others})

    def _raw_string(self, says: dict[str, Any]) -> str:
        conditions = []
        if "minLength" in says or "maxLength" in says:
            least, most = self._length(says, "minLength", 0), self._length(says, "maxLength", None)
            conditions.append(f"(?s:.{{{least},{'' if most is None else most}}})")
        if "pattern" in says:
            if not isinstance(says["pattern"], str):
                raise self._refused("pattern is not a string")
            conditions.append(_found_by(says["pattern"]))
        terminals = [f"/{_lark_regex(one)}<\\//" for one in conditions or ["(?s:.*)"]]
        return f"({' & '.join(terminals)})"

    def _length(self, says: dict[str, Any], keyword: str, default: int | None) -> int | None:
        value = says.get(keyword, default)
        if value is not None and (type(value) is not int or not 0 <= value <= MAX_STRING_CHARS):
            raise self._refused(f"{keyword} must be an integer from 0 to {MAX_STRING_CHARS}")
        return value

    def _target(self, ref: object) -> object:
        """What a local reference points to."""
        if not isinstance(ref, str) or not ref.startswith("#/"):
            raise self._refused(f"$ref {_shown(ref)} is not a place in this schema")
        found: object = self.whole
        for step in ref[2:].split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                raise self._refused(f"$ref {_shown(ref)} leads nowhere")
            found = found[key]
        return found

    def _with_definitions(self, schema: Schema) -> Schema:
        """A schema that stands alone: its references may point into the definitions of the whole."""
        if isinstance(schema, bool) or '"$ref"' not in _json(schema):
            return schema
        return {**{key: self.whole[key] for key in ("$defs", "definitions") if key in self.whole}, **schema}

    def _refused(self, reason: str) -> CodecError:
        return _refused(self.place, f"{reason}")


def _attribute(name: str, place: str) -> str:
    if not name or len(name) > 128 or any(char in '"<>\n\r' for char in name):  # the format has no escapes
        raise _refused(place, f"{_shown(name)} cannot be a parameter's name in a tool call")
    return name
