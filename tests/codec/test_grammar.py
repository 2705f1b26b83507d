from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec import grammar
from codec.errors import CodecError
from codec.grammar import (
    MAX_DEPTH,
    MAX_TEXT_BYTES,
    MAX_TOOLS,
    VERSION,
    Constraint,
    Kind,
    ToolChoice,
    constraint_of,
    grammar_of,
    tool_calls,
)
from codec.vocab import DSML_ID

NO_FORCING = '%llguidance {"no_forcing": true}\n'
TOOL = ("find", {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}})

KINDS: dict[str, Constraint] = {
    "regex": grammar.regex(r"a/b\n|é😀\/", after_think=True),
    "schema": grammar.json_schema({"b": 1, "a": [10**30, 1.5, None, "\ud800"], "type": "object"}),
    "true": grammar.json_schema(True),
    "object": grammar.json_object(after_think=True),
    "lark": grammar.lark('start: "a"'),
    "calls": tool_calls([TOOL, ("now", None)], choice=ToolChoice.AUTO, parallel=False, after_think=True),
    "named": tool_calls([TOOL, ("now", None)], named="now", opened=True),
    "none": tool_calls([TOOL], choice=ToolChoice.NONE),
}


def refused(make: Any, *args: Any, **kwargs: Any) -> CodecError:
    with pytest.raises(CodecError) as caught:
        make(*args, **kwargs)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    return caught.value


def with_parameter(schema: Any, **whole: Any) -> str:
    """The grammar of a tool with one parameter `x`."""
    return grammar_of(tool_calls([("f", {"properties": {"x": schema}, **whole})]))


def forms(schema: Any, **whole: Any) -> tuple[str, list[Any]]:
    """What a parameter may be: its raw strings' terminal, and schemas of the rest without their style."""
    text = with_parameter(schema, **whole)
    strings = re.search(r"^STRING_0_0: (.+)$", text, re.MULTILINE)
    found = [
        json.loads(one) for one in re.findall(r'%json (\{.*?, "x-guidance": \{.*?\}\}|\{"x-guidance": .*?\}\})', text)
    ]
    for one in found:
        style = one.pop("x-guidance")
        assert style == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return strings[1] if strings else "", found


@pytest.mark.parametrize("made", KINDS.values(), ids=KINDS)
def test_a_constraint_survives_the_way_through_its_text(made):
    text = made.text()
    again = constraint_of(text)
    assert again == made
    assert again.text() == text
    assert grammar_of(again) == grammar_of(made)
    assert text.isascii()
    assert json.loads(text)["v"] == VERSION


def test_the_text_keeps_the_order_of_a_schemas_members_and_the_spelling_of_its_numbers():
    text = grammar.json_schema(
        {"required": ["b"], "properties": {"b": {"maximum": 10**30}, "a": {"minimum": 1.0}}}
    ).text()
    assert text == (
        '{"kind":"json_schema","v":1,"schema":{"required":["b"],'
        '"properties":{"b":{"maximum":1000000000000000000000000000000},"a":{"minimum":1.0}}}}'
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a constraint"),
        ("{", "not a constraint"),
        ("[]", "not a constraint"),
        ('{"kind":"magic","v":1}', "not a constraint: Invalid enum value 'magic'"),
        ('{"kind":"json_schema","v":1,"schema":[NaN]}', "NaN is not JSON"),
        ('{"kind":"regex","v":2,"source":"a"}', "version 2, known is 1"),
        ('{"kind":"regex","source":"a"}', "version 0, known is 1"),
        ('{"kind":"regex","v":1}', "empty"),
        ('{"kind":"regex","v":1,"source":"\\ud800"}', "not Unicode text"),
        ('{"kind":"json_schema","v":1,"schema":false}', "no answer fits"),
        ('{"kind":"json_schema","v":1,"schema":3}', "got `int` - at `$.schema`"),
        ('{"kind":"lark","v":1,"source":"%llguidance {}"}', "options of the engine"),
        ("[" * 100_000, "not a constraint"),
        ("x" * (MAX_TEXT_BYTES + 1), f"the limit is {MAX_TEXT_BYTES}"),
    ],
)
def test_a_text_that_is_no_constraint_is_refused_by_the_name_grammar(text, reason):
    error = refused(constraint_of, text)
    assert error.param == "grammar"
    assert error.message.startswith("grammar: ")
    assert reason in error.message


def test_a_text_of_tools_is_checked_like_the_tools_themselves():
    error = refused(constraint_of, '{"kind":"tool_calls","v":1,"tools":[]}')
    assert (error.param, error.message) == ("tools", "tools: 0 of them, from 1 to 128 are possible")


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
def test_rubbish_brings_out_only_our_errors(text):
    with pytest.raises(CodecError):
        constraint_of(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["type", "properties", "anyOf", "oneOf", "allOf", "enum", "const", "$ref", "pattern", "required", "x"]
    ), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
_TYPED = st.dictionaries(st.sampled_from(["type", "enum", "pattern", "anyOf", "items"]), _JSON, max_size=3)


@given(_JSON | _TYPED)
def test_any_schema_gives_a_grammar_or_one_of_our_errors(schema):
    for make in (
        lambda: grammar.json_schema(schema),
        lambda: tool_calls([("f", schema)]),
        lambda: tool_calls([("f", {"properties": {"x": schema}, "$defs": {"y": schema}})]),
    ):
        try:
            made = make()
        except CodecError as error:
            assert error.param  # noqa: PT017 -- both ways out are right
        else:
            assert grammar_of(constraint_of(made.text())) == grammar_of(made)


def test_the_grammars_of_all_kinds():
    assert grammar_of(KINDS["regex"]) == NO_FORCING + r"start: /a\/b\n|é😀\//" + "\n"
    assert grammar_of(grammar.regex("a\n\\\nb\\\\/")) == NO_FORCING + r"start: /a\n\nb\\\//" + "\n"
    assert grammar_of(KINDS["lark"]) == NO_FORCING + 'start: "a"'
    style = '"x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}}'
    assert grammar_of(KINDS["object"]) == f'{NO_FORCING}start: %json {{"type": "object", {style}\n'
    assert grammar_of(KINDS["true"]) == f"{NO_FORCING}start: %json {{{style}\n"
    assert grammar_of(KINDS["none"]).splitlines()[1:3] == ["start: TEXT", "TEXT: /(?s:.*)/"]


def test_a_schema_cannot_choose_the_engines_options():
    text = grammar_of(grammar.json_schema({"x-guidance": {"lenient": True}}))
    assert "lenient" not in text


@pytest.mark.parametrize(
    ("made", "start", "calls"),
    [
        ({"choice": ToolChoice.REQUIRED}, f'"\\n\\n<" <[{DSML_ID}]> " calls>\\n" block', "call+"),
        ({"opened": True, "parallel": False}, "block", "call"),
        ({"choice": ToolChoice.AUTO}, f'TEXT | BEFORE_CALLS <[{DSML_ID}]> " calls>\\n" block', "call+"),
    ],
)
def test_how_a_block_of_calls_begins(made, start, calls):
    lines = grammar_of(tool_calls([TOOL], **made)).splitlines()
    assert lines[1] == f"start: {start}"
    assert lines[2] == f'block: {calls} "</" <[{DSML_ID}]> " calls>"'


def test_a_named_choice_leaves_one_tool():
    assert [tool.name for tool in KINDS["named"].tools] == ["now"]
    assert "find" not in grammar_of(KINDS["named"])
    error = refused(tool_calls, [TOOL], named="lose")
    assert (error.param, error.message) == ("tool_choice", "tool_choice: no tool is named 'lose'")


ANY_STRING = r"(/(?s:.*)<\//)"
NOT_STRINGS = ["null", "boolean", "integer", "number", "array", "object"]


@pytest.mark.parametrize(
    ("schema", "strings", "others"),
    [
        ({"type": "string", "description": "d", "format": "date", "default": 3}, ANY_STRING, []),
        ({"type": "integer", "minimum": 3}, "", [{"type": "integer", "minimum": 3}]),
        ({"type": ["string", "null"]}, ANY_STRING, [{"type": ["null"]}]),
        (True, ANY_STRING, [{"type": NOT_STRINGS}]),
        ({}, ANY_STRING, [{"type": NOT_STRINGS}]),
        ({"properties": {"a": {}}}, "", [{"properties": {"a": {}}, "type": NOT_STRINGS}]),
        ({"enum": ["a", 1, None, "</"]}, '"a</" | "</</"', [{"enum": [1, None]}]),
        ({"type": ["string", "null"], "enum": ["a", None]}, '"a</"', [{"enum": [None], "type": ["null"]}]),
        ({"type": "string", "enum": ["a", 1]}, '"a</"', []),
        ({"const": 'é"\n'}, r'"\u00e9\"\n</"', []),
        ({"type": "integer", "enum": [1]}, "", [{"type": "integer", "enum": [1]}]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "string"}]}, ANY_STRING, [{"type": "null"}]),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ANY_STRING, [{"type": "null"}]),
        (
            {"oneOf": [{"const": "a"}, {"type": "null"}, {"type": "integer"}]},
            '"a</"',
            [{"oneOf": [{"type": "null"}, {"type": "integer"}]}],
        ),
        ({"allOf": [{"type": "string"}], "title": "t"}, ANY_STRING, []),
        ({"type": "string", "minLength": 2}, r"(/(?s:.{2,})<\//)", []),
        ({"type": "string", "maxLength": 5}, r"(/(?s:.{0,5})<\//)", []),
        ({"type": "string", "pattern": "^a$", "maxLength": 5}, r"(/(?s:.{0,5})<\// & /(?:(?:a))<\//)", []),
    ],
)
def test_a_parameters_schema_becomes_raw_strings_and_json(schema, strings, others):
    assert forms(schema) == (strings, others)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a", "(?s:.*)(?:a)(?s:.*)"),
        ("^a", "(?:a)(?s:.*)"),
        ("a$", "(?s:.*)(?:a)"),
        (r"^a\$", r"(?:a\$)(?s:.*)"),
        (r"^a\\$", r"(?:a\\)"),
        ("^a|b$", "(?:a)(?s:.*)|(?s:.*)(?:b)"),
        ("^(a|b)$", "(?:(a|b))"),
        ("^[|(]$|c", "(?:[|(])|(?s:.*)(?:c)(?s:.*)"),
        (r"^[]|]\|$", r"(?:[]|]\|)"),
        (r"^\d[\d\w]\D$", "(?:[0-9][[0-9][0-9A-Za-z_]][^0-9])"),
        ("^a/b$", r"(?:a\/b)"),
        ("", "(?s:.*)(?:)(?s:.*)"),
    ],
)
def test_a_pattern_is_searched_for_in_the_whole_string(pattern, found):
    assert forms({"type": "string", "pattern": pattern})[0] == rf"(/(?:{found})<\//)"


def test_a_reference_is_followed_for_strings_and_kept_for_json():
    definitions: dict[str, Any] = {
        "s": {"enum": ["a", "b"]},
        "t/~": {"type": "string"},
        "o": {"type": "array", "items": {"$ref": "#/$defs/s"}},
    }
    assert forms({"$ref": "#/$defs/s"}, **{"$defs": definitions}) == ('"a</" | "b</"', [])
    assert forms({"$ref": "#/$defs/t~1~0"}, **{"$defs": definitions}) == (ANY_STRING, [])
    assert forms({"$ref": "#/$defs/o"}, **{"$defs": definitions}) == ("", [{"$defs": definitions, **definitions["o"]}])


def test_parameters_come_in_the_schemas_order_and_only_optional_ones_may_be_left_out():
    text = grammar_of(tool_calls([("f", {"properties": {"a": {}, "b": {}}, "required": ["b", "c"]})]))
    rules = dict(line.split(": ", 1) for line in text.splitlines()[1:])
    assert rules["none_0_0"] == "given_0_0 some_0_1 | none_0_1"
    assert rules["none_0_1"] == rules["some_0_1"] == "given_0_1 some_0_2"
    assert rules["none_0_2"] == "given_0_2 some_0_3"
    assert 'name=\\"c\\"' in rules["given_0_2"]  # required, though nothing else is said of it
    assert (rules["none_0_3"], rules["some_0_3"]) == ('"\\n"', '""')


X = "tools[0].function.parameters.properties.x"
P = "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ([], P, "an object, true or false"),
        (False, P, "must have type object"),
        ({"type": "array"}, P, "must have type object"),
        ({"anyOf": []}, P, "anyOf cannot be enforced"),
        ({"minProperties": 1}, P, "minProperties cannot be enforced"),
        ({"properties": []}, f"{P}.properties", "not an object"),
        ({"required": "x"}, f"{P}.required", "not a list of names"),
        ({"required": [1]}, f"{P}.required", "not a list of names"),
        ({"properties": {"x": 3}}, X, "not a schema"),
        ({"properties": {"x": False}, "required": ["x"]}, X, "no value fits"),
        ({"properties": {"x": {"enum": []}}, "required": ["x"]}, X, "no value fits"),
        ({"properties": {"x": {"type": "strng"}}}, X, "'strng' is not a type"),
        ({"properties": {"x": {"not": {}}}}, X, "not cannot be enforced"),
        ({"properties": {"x": {"type": "string", "not": {}}}}, X, "not beside other keywords"),
        ({"properties": {"x": {"allOf": [{}, {}]}}}, X, "allOf cannot be enforced"),
        ({"properties": {"x": {"anyOf": {}}}}, X, "anyOf is not a list"),
        ({"properties": {"x": {"oneOf": [{"const": "a"}, {"type": "string"}]}}}, X, "more than one kind of string"),
        ({"properties": {"x": {"enum": ["a"], "minLength": 2}}}, X, "beside other keywords"),
        ({"properties": {"x": {"enum": "a"}}}, X, "enum"),
        ({"properties": {"x": {"type": "string", "minLength": -1}}}, X, "minLength must be"),
        ({"properties": {"x": {"type": "string", "maxLength": True}}}, X, "maxLength must be"),
        ({"properties": {"x": {"type": "string", "pattern": 1}}}, X, "pattern is not a string"),
        ({"properties": {"x": {"$ref": "https://a"}}}, X, "not a place in this schema"),
        ({"properties": {"x": {"$ref": "#/$defs/y"}}}, X, "leads nowhere"),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, X, "references without an end"),
        ({"properties": {'a"': {}}}, f'{P}.properties.a"', "cannot be a parameter's name"),
        ({"properties": {"x": {"type": "string", "pattern": "\ud800"}}}, "tools", "not Unicode text"),
        ({"properties": {"x": {"type": "integer", "minimum": float("nan")}}}, P, "not JSON"),
    ],
)
def test_a_schema_of_arguments_that_cannot_be_kept_to_is_refused_by_its_place(schema, place, reason):
    error = refused(tool_calls, [("f", schema)])
    assert error.param == place
    assert error.message.startswith(f"{place}: ")
    assert reason in error.message


def test_the_place_counts_the_tools():
    assert refused(tool_calls, [TOOL, ("g", 3)]).param == "tools[1].function.parameters"
    assert refused(tool_calls, [TOOL, ("two words", None)]).param == "tools[1].function.name"


def test_an_opened_block_belongs_to_forced_calls_without_reasoning():
    assert refused(tool_calls, [TOOL], opened=True, after_think=True).param == "tools"
    assert refused(tool_calls, [TOOL], opened=True, choice=ToolChoice.AUTO).param == "tools"


def test_schemas_that_unfold_without_measure_are_refused():
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(14)} | {
        "d14": {"type": "string"}
    }
    assert "unfold" in refused(with_parameter, {"$ref": "#/$defs/d0"}, **{"$defs": doubling}).message
    words = {"w": {"enum": [f"word {n}" for n in range(2_000)]}}
    many = {"properties": {f"p{n}": {"$ref": "#/$defs/w"} for n in range(100)}, "$defs": words}
    assert "unfold" in refused(tool_calls, [("f", many)]).message


def test_size_depth_and_number_have_limits():
    assert "the limit is" in refused(grammar.regex, "a" * MAX_TEXT_BYTES, param="response_format.regex").message
    assert refused(grammar.regex, "", param="response_format.regex").param == "response_format.regex"
    assert "the limit is" in refused(grammar.json_schema, {"enum": ["漢" * 30_000]}).message
    assert refused(grammar.lark, "").message == "grammar: empty"
    assert refused(tool_calls, [TOOL] * (MAX_TOOLS + 1)).param == "tools"
    deep: Any = {}
    for _ in range(MAX_DEPTH - 1):
        deep = {"a": deep}
    assert grammar.json_schema(deep).kind is Kind.JSON_SCHEMA
    assert "nested deeper" in refused(grammar.json_schema, {"a": deep}).message
