from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits

from codec import grammar
from codec.bpe import Bpe, official_bpe
from codec.grammar import Constraint, ToolChoice, tool_calls
from codec.vocab import BOS_ID, DSML_ID, EOS_ID, THINK_END_ID, VOCAB_SIZE, OutputVocab, Vocabulary, load_vocabulary
from kernels.sample import sample, uniform
from pipeline.events import FinishReason
from stages.constraints import ConstraintError
from stages.engine.constraint import (
    MASK_WORDS,
    Allowed,
    CompiledConstraint,
    ConstraintCompiler,
    ConstraintState,
    GrammarBuilder,
    Words,
    check_grammar,
    mask_logits,
)

D = "\U0010fffd"  # the control token DSML in a test's text: a private character that no test text holds otherwise
THINK_END = "\U0010fffc"
_CONTROLS = {D: DSML_ID, THINK_END: THINK_END_ID}

OPEN, CLOSE = f"\n\n<{D} calls>\n", f"</{D} calls>"

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user", None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,5}$"}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "ok": {"type": "boolean"}},
            "required": ["lat"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F", 7]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$|^x", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "where": {"$ref": "#/$defs/place"},
        "note": {"type": ["string", "null"], "maxLength": 10},
    },
    "required": ["city", "days"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [("get_weather", WEATHER), ("now", None)]
SUMS = 'start: sum\nsum: part ("+" part)*\npart: /[1-9][0-9]{0,2}/ | "(" sum ")"\n'
REGEXES = (
    r"[a-z]{3,8}@[a-z]+\.(com|org)",
    r"([0-9]{2}:){2}[0-9]{2}",
    r"[ab]*a[ab]{6}c",
    "(é|日本|😀){1,3}/?",
    r"a\nb|x",
    'a/ | "x" /|\n/b',
)

KINDS: dict[str, Constraint] = {
    **{f"regex-{index}": grammar.regex(source) for index, source in enumerate(REGEXES)},
    "schema": grammar.json_schema(PERSON),
    "object": grammar.json_object(),
    "lark": grammar.lark(SUMS),
    "calls": tool_calls(TOOLS),
    "one-call": tool_calls(TOOLS, named="get_weather", parallel=False, opened=True),
    "maybe-calls": tool_calls(TOOLS, choice=ToolChoice.AUTO),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As engines run; several threads on a machine that others use only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


@pytest.fixture(scope="module")
def vocab(vocabulary) -> OutputVocab:
    return OutputVocab(vocabulary)


@pytest.fixture(scope="module")
def bpe(vocabulary) -> Bpe:
    return official_bpe(vocabulary.tokenizer_json)


@pytest.fixture(scope="module")
def build(vocab) -> GrammarBuilder:
    return GrammarBuilder(vocab)


@pytest.fixture(scope="module")
def compiled(build) -> dict[str, CompiledConstraint]:
    return {name: build(constraint.text()) for name, constraint in KINDS.items()}


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    """Logits of a model that knows nothing: [16, V]."""
    return np.random.default_rng(5).normal(size=(16, VOCAB_SIZE)).astype(np.float32)


@pytest.fixture(scope="module")
def wish_to_end(vocab) -> np.ndarray:
    """What the logits of tokens that close something are raised by, [V], so that unbounded kinds come to an end."""
    closing = {b'"', b"}", b"]", b")", b"</", b"c", b"\n", b"@", b".", b"com"}
    wish = np.array([float(vocab.token_bytes(t) in closing) for t in range(VOCAB_SIZE)], np.float32)
    wish[[EOS_ID, DSML_ID]] = 3  # where they may come, they should
    return wish


def encode(bpe: Bpe, text: str) -> list[int]:
    """Official ids of a text with control tokens."""
    ids: list[int] = []
    for piece in re.split(f"([{D}{THINK_END}])", text):
        ids += [_CONTROLS[piece]] if piece in _CONTROLS else np.frombuffer(bpe(piece), "<u4").tolist()
    return ids


def decode(vocab: OutputVocab, tokens: list[int]) -> str:
    names = {token: char for char, token in _CONTROLS.items()}
    return b"".join(names[t].encode() if t in names else vocab.token_bytes(t) for t in tokens).decode()


def mask_of(state: ConstraintState) -> tuple[Allowed, Words]:
    row = np.full(MASK_WORDS, 0x5A5A5A5A, np.int32)  # an earlier mask's bits
    return state.allowed_mask(row), row


def allows(row: Words, token: int) -> bool:
    return bool(row[token >> 5] >> (token & 31) & 1)


def follow(state: ConstraintState, tokens: list[int]) -> bool:
    """Whether each token was allowed in its turn."""
    for token in tokens:
        if not allows(mask_of(state)[1], token):
            return False
        state.advance(token)
        assert not state.fault
    return True


def accepted(compiled: CompiledConstraint, tokens: list[int]) -> bool:
    return follow(ConstraintState(compiled), [*tokens, EOS_ID])


Step = Callable[[ConstraintState, list[int]], None]


def generate(
    compiled: CompiledConstraint, noise: np.ndarray, wish: np.ndarray, seed: int, look: Step | None = None
) -> list[int]:
    """A random answer under the constraint, without its EOS; a long one is led to an end."""
    state, tokens, random = ConstraintState(compiled), list[int](), Random(seed)
    for position in range(400):
        shift = random.randrange(VOCAB_SIZE)
        row = np.roll(noise[random.randrange(len(noise))], shift) + wish * (max(0, position - 12) / 4)
        logits = torch.from_numpy(row[None].copy())
        (found,) = mask_logits(logits, [state])
        assert found in {Allowed.SOME, Allowed.END}
        if look is not None:
            look(state, tokens)
        warm = 1.0 if position < 6 else 0.0
        token = sample(logits[0], temperature=warm, top_p=1.0, top_k=0, u=uniform(seed, position))
        state.advance(token)
        assert not state.fault
        if token == EOS_ID:
            return tokens
        assert found is Allowed.SOME
        tokens.append(token)
    raise AssertionError("the answer has no end")


# A second opinion on what is right: small and slow, shares nothing with the code under test.


def fits(schema: Any, value: Any, root: Any) -> bool:  # noqa: PLR0911 -- one line a keyword
    """Whether a value fits a schema of the keywords that the tests use."""
    if isinstance(schema, bool):
        return bool(schema)
    if "$ref" in schema:
        return fits(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    types = schema.get("type", [])
    if types and not any(_is(one, value) for one in ([types] if isinstance(types, str) else types)):
        return False
    match value:
        case bool() | None:
            return True
        case str():
            found = re.search(schema.get("pattern", ""), value) is not None
            return found and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
        case int() | float():
            return bool(schema.get("minimum", -(10**400)) <= value <= schema.get("maximum", 10**400))
        case list():
            small = len(value) <= schema.get("maxItems", 10**9)
            return small and all(fits(schema.get("items", True), one, root) for one in value)
        case _:
            known = schema.get("properties", {})
            extra = schema.get("additionalProperties", True)
            return set(schema.get("required", ())) <= value.keys() and all(
                fits(known.get(name, extra), one, root) for name, one in value.items()
            )


def _is(name: str, value: Any) -> bool:
    python = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if name in {"integer", "number"}:
        return type(value) is int or (name == "number" and type(value) is float)
    return isinstance(value, python[name])


def calls_of(text: str, *, opened: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a block that is nothing but right. Raises AssertionError for any other text."""
    block = re.fullmatch(f"(.+)</{D} calls>", text if opened else text.removeprefix(OPEN), re.DOTALL)
    assert opened or text.startswith(OPEN), text
    assert block, text
    call = f'<{D} invoke name="([^"]+)">\n(\n|(?:(?!<{D} invoke).)+?)</{D} invoke>\n'
    parameter = f'<{D} parameter name="([^"]+)" string="(true|false)">([^{D}]*)</{D} parameter>\n'
    assert re.fullmatch(f"(?:{call})+", block[1], re.DOTALL), text
    found = []
    for name, body in re.findall(call, block[1], re.DOTALL):
        assert body == "\n" or re.fullmatch(f"(?:{parameter})+", body), text
        given = re.findall(parameter, body)
        assert len({key for key, _, _ in given}) == len(given)
        found.append((name, {key: raw if string == "true" else json.loads(raw) for key, string, raw in given}))
    return found


def check_calls(calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert calls
    for name, arguments in calls:
        schema = {**(dict(TOOLS)[name] or {}), "additionalProperties": False}
        assert fits(schema, arguments, schema), (name, arguments)


def check_answer(name: str, text: str) -> None:
    match name:
        case "schema":
            assert fits(PERSON, json.loads(text), PERSON), text
        case "object":
            assert isinstance(json.loads(text), dict)
        case "lark":
            assert re.fullmatch(r"[0-9+()]+", text)
            assert eval(text) > 0
        case "calls":
            check_calls(calls_of(text))
        case "one-call":
            ((called, _),) = calls = calls_of(text, opened=True)
            check_calls(calls)
            assert called == "get_weather"
        case "maybe-calls":
            if D in text:
                content, mark, block = text.partition(f"\n\n<{D} calls>")
                assert D not in content
                check_calls(calls_of(mark + block))
        case _:
            assert re.fullmatch(REGEXES[int(name[-1])], text), text


def call(name: str, *parameters: tuple[str, bool, str]) -> str:
    lines = [f'<{D} parameter name="{k}" string="{str(s).lower()}">{v}</{D} parameter>\n' for k, s, v in parameters]
    return "".join([f'<{D} invoke name="{name}">\n', *(lines or ["\n"]), f"</{D} invoke>\n"])


CITY, DAYS = ("city", True, "a</b>\n\n<c"), ("days", False, "12")
SHORT = '{"name": "Zoë \\"Z\\"", "age": 7, "home": {"lat": -1.5e3}}'


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("regex-0", "anna@tide.org"),
        ("regex-1", "06:42:00"),
        ("regex-2", "bbaabababc"),
        ("regex-3", "é日本😀"),
        ("regex-3", "é/"),
        ("regex-4", "a\nb"),
        ("regex-5", "a/ "),
        ("regex-5", ' "x" /'),
        ("regex-5", "\n/b"),
        ("schema", SHORT),
        ("schema", SHORT.replace(', "home"', ', "role": null, "tags": ["a", "bc"], "home"')),
        ("object", '{"a": [1, {"b": null}], "漢": "\\n"}'),
        ("object", "{}"),
        ("lark", "1+(23+(4))+567"),
        ("calls", OPEN + call("get_weather", CITY, DAYS) + CLOSE),
        ("calls", OPEN + call("now") + call("get_weather", CITY, ("unit", False, "7"), DAYS) + CLOSE),
        ("calls", OPEN + call("get_weather", CITY, ("unit", True, "F"), ("code", True, "x12"), DAYS) + CLOSE),
        ("calls", OPEN + call("get_weather", ("city", True, ""), DAYS, ("where", False, '{"lat": 1}')) + CLOSE),
        ("one-call", call("get_weather", CITY, DAYS, ("note", False, "null")) + CLOSE),
        ("maybe-calls", "It rains.\n\n<p>"),
        ("maybe-calls", ""),
        ("maybe-calls", "Let me see." + OPEN + call("now") + CLOSE),
        ("maybe-calls", OPEN + call("now") + CLOSE),
    ],
)
def test_a_right_text_is_allowed_token_by_token_to_its_end(compiled, bpe, name, right):
    assert accepted(compiled[name], encode(bpe, right))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("regex-0", "an@tide.org"),
        ("regex-0", "anna@tide.net"),
        ("regex-1", "06:42"),
        ("regex-4", "a b"),
        ("schema", SHORT.replace("7", "151")),
        ("schema", SHORT.replace('"age": 7, ', "")),
        ("schema", SHORT.replace("Zoë", "Zoë longer than this")),
        ("schema", SHORT.replace("}}", '}, "x": 1}')),
        ("schema", SHORT.replace(', "home"', ', "tags": ["A"], "home"')),
        ("schema", SHORT[:-1]),
        ("schema", f"{SHORT} "),
        ("object", "[]"),
        ("object", '{"a":\n1}'),
        ("lark", "1+(2"),
        ("lark", "0"),
        ("calls", "Let me see." + OPEN + call("now") + CLOSE),
        ("calls", OPEN + CLOSE),
        ("calls", OPEN + call("delete_all") + CLOSE),
        ("calls", OPEN + call("get_weather", CITY) + CLOSE),
        ("calls", OPEN + call("get_weather", DAYS, CITY) + CLOSE),
        ("calls", OPEN + call("get_weather", CITY, CITY, DAYS) + CLOSE),
        ("calls", OPEN + call("get_weather", CITY, ("days", True, "12")) + CLOSE),
        ("calls", OPEN + call("get_weather", CITY, ("days", False, "100")) + CLOSE),
        ("calls", OPEN + call("get_weather", CITY, ("unit", True, "K"), DAYS) + CLOSE),
        ("calls", OPEN + call("get_weather", CITY, ("code", True, "ABC"), DAYS) + CLOSE),
        ("calls", OPEN + call("get_weather", CITY, ("code", True, "x123456"), DAYS) + CLOSE),
        ("calls", OPEN + call("get_weather", CITY, DAYS, ("where", False, '{"lon": 1}')) + CLOSE),
        ("calls", OPEN + call("now", ("x", False, "1")) + CLOSE),
        ("calls", OPEN + call("now") + CLOSE + "!"),
        ("calls", (OPEN + call("now") + CLOSE).replace(D, "｜DSML｜")),
        ("one-call", call("get_weather", CITY, DAYS) + call("get_weather", CITY, DAYS) + CLOSE),
        ("one-call", call("now") + CLOSE),
        ("maybe-calls", "x" + D),
        ("maybe-calls", "Let me see." + OPEN + call("now")),
    ],
)
def test_a_wrong_text_is_refused_somewhere(compiled, bpe, name, wrong):
    assert not accepted(compiled[name], encode(bpe, wrong))


@pytest.mark.parametrize("name", KINDS)
def test_random_logits_give_a_right_answer_for_every_seed(compiled, vocab, noise, wish_to_end, name):
    answers = {decode(vocab, generate(compiled[name], noise, wish_to_end, seed)) for seed in range(40)}
    for text in answers:
        check_answer(name, text)
    assert len(answers) > 1


@pytest.mark.parametrize("name", ["regex-3", "schema", "lark", "calls", "maybe-calls"])
def test_a_rebuilt_state_allows_the_same_tokens_at_every_position(compiled, noise, wish_to_end, name):
    def look(lived: ConstraintState, tokens: list[int]) -> None:
        found, row = mask_of(lived)
        again, rebuilt = mask_of(ConstraintState.replay(compiled[name], tokens))
        assert found is again
        assert (row == rebuilt).all()

    generate(compiled[name], noise, wish_to_end, 3, look)


@pytest.mark.parametrize("name", KINDS)
def test_no_control_token_is_ever_allowed_but_eos_and_dsml_in_calls(compiled, vocab, noise, wish_to_end, name):
    banned = np.array(sorted(vocab.added_ids - {EOS_ID} - ({DSML_ID} if "call" in name else set())))

    def look(state: ConstraintState, _tokens: list[int]) -> None:
        row = mask_of(state)[1]
        assert not (row[banned >> 5] >> (banned & 31) & 1).any()

    generate(compiled[name], noise, wish_to_end, 4, look)


def test_nothing_is_constrained_before_the_reasoning_ends(build, bpe):
    state = ConstraintState(build(grammar.regex("ab", after_think=True).text()))
    logits = torch.zeros(1, VOCAB_SIZE)
    for token in [*encode(bpe, "Hm. {\n\nab"), DSML_ID, BOS_ID, EOS_ID, 128_821]:
        assert mask_logits(logits, [state]) == [Allowed.ANY]
        found, row = mask_of(state)
        assert (found, state.is_active) == (Allowed.ANY, False)
        assert (row == -1).all()
        state.advance(token)
    assert not logits.any()
    state.advance(THINK_END_ID)
    assert state.is_active
    assert not allows(mask_of(state)[1], THINK_END_ID)
    assert follow(state, [*encode(bpe, "ab"), EOS_ID])


def test_a_rebuilt_state_finds_the_end_of_reasoning_in_its_tokens(build, bpe):
    compiled = build(grammar.regex("[0-9]+", after_think=True).text())
    tokens = encode(bpe, f"one, two{THINK_END}12")
    lived = ConstraintState(compiled)
    for count, token in enumerate(tokens):
        assert mask_of(lived)[0] is mask_of(ConstraintState.replay(compiled, tokens[:count]))[0]
        lived.advance(token)
    assert (mask_of(lived)[1] == mask_of(ConstraintState.replay(compiled, tokens))[1]).all()


def test_a_complete_text_that_nothing_can_follow_leaves_eos_alone_and_after_it_still(compiled, bpe):
    state = ConstraintState(compiled["regex-1"])
    assert follow(state, encode(bpe, "06:42:00"))
    for _ in range(2):
        found, row = mask_of(state)
        assert found is Allowed.END
        assert np.flatnonzero(row).tolist() == [0]
        assert row[0] == 2
        state.advance(EOS_ID)
    assert not state.fault


def test_a_text_that_is_complete_but_may_go_on_allows_eos_and_more(compiled, bpe):
    state = ConstraintState(compiled["lark"])
    assert follow(state, encode(bpe, "12"))
    found, row = mask_of(state)
    assert found is Allowed.SOME
    assert allows(row, EOS_ID)
    assert allows(row, *encode(bpe, "+"))


@pytest.mark.parametrize("token", [5, EOS_ID, THINK_END_ID, DSML_ID, -1, VOCAB_SIZE, 1 << 40])
def test_a_token_that_was_not_allowed_is_a_named_fault_that_stays(compiled, bpe, token):
    state = ConstraintState(compiled["regex-1"])
    state.advance(*encode(bpe, "06"))
    state.advance(token)
    assert state.fault
    named = state.fault
    state.advance(*encode(bpe, ":"))
    found, row = mask_of(state)
    assert (found, state.fault) == (Allowed.FAULT, named)
    assert np.flatnonzero(row).tolist() == [0]
    assert row[0] == 2


@pytest.mark.parametrize("token", [THINK_END_ID, DSML_ID, BOS_ID])
def test_a_grammar_that_leads_to_a_control_token_ends_in_a_named_fault(build, bpe, token):
    states = [ConstraintState(build(grammar.lark(f'start: "a" <[{token}]>').text())) for _ in range(2)]
    assert all(follow(state, encode(bpe, "a")) for state in states)
    logits = torch.zeros(1, VOCAB_SIZE)
    assert mask_logits(logits, states[:1]) == [Allowed.FAULT]
    assert states[0].fault == "no token of the vocabulary can follow"
    assert logits.isfinite().nonzero().tolist() == [[0, EOS_ID]]
    states[1].advance(token)
    assert states[1].fault == f"token {token} is not allowed here"


def test_an_answer_that_becomes_too_complex_ends_in_the_librarys_own_words(build, bpe):
    state = ConstraintState(build(grammar.regex("[xy]z(?:.{0,99}[^a]){0,99}&").text()))
    found = Allowed.SOME
    for token in encode(bpe, "x") + encode(bpe, "z") + encode(bpe, "b") * 50:
        if (found := mask_of(state)[0]) is not Allowed.SOME:
            break
        state.advance(token)
    assert found is Allowed.FAULT  # where the library says that EOS may follow
    assert "too" in state.fault


def follow_blindly(state: ConstraintState, tokens: list[int]) -> bool:
    """Advance as long as nothing fails."""
    for token in tokens:
        if mask_of(state)[0] is Allowed.FAULT:
            return False
        state.advance(token)
    return not state.fault


def test_a_masked_row_depends_on_nothing_but_itself(compiled, bpe, noise):
    names = ["schema", "", "lark", "calls", ""]
    states = [ConstraintState(compiled[name]) if name else None for name in names]
    together = torch.from_numpy(noise[:5].copy())
    founds = mask_logits(together, states)
    for index, (state, found) in enumerate(zip(states, founds, strict=True)):
        alone = torch.from_numpy(noise[index : index + 1].copy())
        assert mask_logits(alone, [state]) == [found]
        assert torch.equal(alone[0], together[index])
        if state is None:
            assert np.array_equal(together[index].numpy(), noise[index])
        else:
            kept = together[index].isfinite().numpy()
            assert np.array_equal(together[index].numpy()[kept], noise[index][kept])
            row = mask_of(state)[1]
            assert np.array_equal(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB_SIZE], kept)


def test_a_states_row_for_each_row_of_logits(compiled):
    with pytest.raises(ValueError, match="2 rows of logits, 1 states"):
        mask_logits(torch.zeros(2, VOCAB_SIZE), [None])


def test_a_padded_vocabulary_never_chooses_its_padding(compiled):
    logits = torch.zeros(1, VOCAB_SIZE + 64)
    mask_logits(logits, [ConstraintState(compiled["schema"])])
    assert not logits[0, VOCAB_SIZE:].isfinite().any()


def test_a_row_before_its_constraint_is_not_touched_at_all(build):
    logits = torch.zeros(2, VOCAB_SIZE + 64)
    state = ConstraintState(build(grammar.json_object(after_think=True).text()))
    assert mask_logits(logits, [state, None]) == [Allowed.ANY] * 2
    assert not logits.any()


def test_a_model_with_fewer_tokens_is_constrained_within_them_or_refused(vocab, bpe):
    small = GrammarBuilder(vocab, vocab_size=512)
    state = ConstraintState(small(grammar.regex("[a-z]{2}").text()))
    logits = torch.zeros(1, 512)
    assert mask_logits(logits, [state]) == [Allowed.SOME]
    assert logits.isfinite().sum() > 26
    with pytest.raises(ConstraintError, match="no token of the vocabulary can follow"):
        small(grammar.lark("start: <[4000]>").text())
    with pytest.raises(ValueError, match="has no EOS"):
        GrammarBuilder(vocab, vocab_size=1)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (grammar.json_schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (grammar.json_schema({"type": "strng"}), "Invalid type: strng"),
        (grammar.json_schema({"$ref": "https://example.com/a.json"}), "does not fetch"),
        (grammar.json_schema({"x-guidance": {"lenient": True}, "not": {}}), "not"),
        (grammar.regex("a(?=b)"), "invalid regex"),
        (grammar.regex(r"(a)\1"), "invalid regex"),
        (grammar.regex("(a"), "invalid regex"),
        (grammar.lark("start: missing"), "missing"),
        (grammar.lark("%%%"), "lexer error"),
        (tool_calls([("f", {"properties": {"a": {"type": "string", "pattern": "(?=x)"}}})]), "invalid regex"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_says_why_with_and_without_a_vocabulary(build, constraint, reason):
    with pytest.raises(ConstraintError, match=re.escape(reason)) as caught:
        build(constraint.text())
    assert caught.value.finish is FinishReason.GRAMMAR_ERROR
    with pytest.raises(ConstraintError, match=re.escape(reason)):
        check_grammar(constraint.text())


@pytest.mark.parametrize("constraint", KINDS.values(), ids=KINDS)
def test_every_kind_passes_the_check_without_a_vocabulary(constraint):
    check_grammar(constraint.text())


def test_a_text_that_is_no_constraint_is_a_named_error(build):
    with pytest.raises(ConstraintError, match="grammar: not a constraint") as caught:
        build("{")
    assert caught.value.finish is FinishReason.GRAMMAR_ERROR


def _nested(levels: int, inner: dict[str, Any]) -> dict[str, Any]:
    for _ in range(levels):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


_AMBIGUOUS = "start: s\ns: s s | s s s | " + '"a" | "aa" | ""\n'
ADVERSARIAL: dict[str, Constraint] = {
    "nested counters": grammar.regex("((a{1,1000}){1,1000}){1,1000}"),
    "counters of classes": grammar.regex(r"(\w{1,500}\d?){1,500}"),
    "states": grammar.regex("(.*a.{20}){10}"),
    "too many expressions": grammar.regex("(?:.{0,99}[^a]){0,99}&"),
    "groups": grammar.regex("(" * 20_000 + "a" + ")" * 20_000),
    "ten thousand words": grammar.regex("|".join(f"w{n}" for n in range(10_000))),
    "deep": grammar.json_schema(_nested(48, {"type": "string"})),
    "many properties": grammar.json_schema(
        {"type": "object", "properties": {f"p{n}": {"pattern": f"^[a-z]{{{n % 50}}}$"} for n in range(2_500)}}
    ),
    "long array": grammar.json_schema({"type": "array", "minItems": 10**6, "items": {"type": "integer"}}),
    "ambiguous": grammar.lark(_AMBIGUOUS),
    "nested rules": grammar.lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "many tools": tool_calls(
        [(f"f{n}", {"properties": {f"p{k}": {"type": ["string", "null"]} for k in range(20)}}) for n in range(100)]
    ),
}


@pytest.mark.parametrize("constraint", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_a_hostile_constraint_ends_in_bounded_time_in_masks_or_a_named_error(build, vocab, constraint):
    began = monotonic()
    outcome = outcome_of(build, constraint.text())
    if isinstance(outcome, ConstraintError):
        assert outcome.finish is FinishReason.GRAMMAR_ERROR
        assert 0 < len(outcome.reason) <= 300
    else:
        walk(ConstraintState(outcome), Random(1))
    assert monotonic() - began < 20


def outcome_of(build: Callable[[str], CompiledConstraint], text: str) -> CompiledConstraint | ConstraintError:
    try:
        return build(text)
    except ConstraintError as error:
        return error


def walk(state: ConstraintState, random: Random) -> None:
    """Forty random steps, or fewer when the answer ends."""
    for _ in range(40):
        found, row = mask_of(state)
        assert bool(state.fault) is (found is Allowed.FAULT)
        if found is not Allowed.SOME:
            return
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        state.advance(int(random.choice(allowed[1:] if len(allowed) > 1 else allowed)))


@pytest.fixture(scope="module")
def tight(vocab) -> GrammarBuilder:
    """A builder whose lexers may learn little."""
    return GrammarBuilder(vocab, limits=LLParserLimits(max_lexer_states=2_000, verbose_errors=False))


EXPONENTIAL = grammar.regex("[ab]*a[ab]{40}c").text()


def masks_of(compiled: CompiledConstraint, tokens: list[int]) -> Iterator[bytes]:
    """The mask of each position; empty from a fault on."""
    state = ConstraintState(compiled)
    for token in tokens:
        found, row = mask_of(state)
        yield b"" if found is Allowed.FAULT else row.tobytes()
        state.advance(token)


def test_a_sequence_goes_on_when_another_has_used_up_what_both_share(tight, bpe):
    a, b = encode(bpe, "a") + encode(bpe, "b")
    random = Random(7)
    one, other = ([random.choice([a, b]) for _ in range(150)] for _ in range(2))
    alone = list(masks_of(tight(EXPONENTIAL), one))
    assert all(alone)
    shared = tight(EXPONENTIAL)
    in_turns = [first for first, _ in zip(masks_of(shared, one), masks_of(shared, other), strict=True)]
    assert in_turns == alone
    assert all(masks_of(shared, one + other))  # longer than what one lexer may learn
    assert list(masks_of(shared, one)) == alone


def test_a_sequence_that_only_takes_tokens_goes_on_too(tight, bpe):
    shared, letters, random = tight(EXPONENTIAL), encode(bpe, "a") + encode(bpe, "b"), Random(7)
    early = ConstraintState(shared)
    tokens = [random.choice(letters) for _ in range(300)]
    assert follow_blindly(ConstraintState(shared), tokens)  # uses up what `early` shares
    for token in tokens[:150]:
        early.advance(token)
    assert not early.fault


def test_a_lexer_that_is_full_again_at_once_ends_the_sequence(tight, bpe):
    state = ConstraintState(tight(EXPONENTIAL))
    random, letters = Random(7), encode(bpe, "a") + encode(bpe, "b")
    assert not follow_blindly(state, [random.choice(letters) for _ in range(600)])
    assert "too many states" in state.fault


def test_two_thousand_random_token_streams_never_raise(compiled):
    random, names = Random(11), list(compiled)
    foreign = [-1, VOCAB_SIZE, 1 << 33, EOS_ID, THINK_END_ID, DSML_ID]
    for number in range(2_000):
        tokens = [
            random.choice(foreign) if random.random() < 0.1 else random.randrange(VOCAB_SIZE)
            for _ in range(random.randint(1, 12))
        ]
        chosen = compiled[names[number % len(names)]]
        lived = ConstraintState(chosen)
        for token in tokens:
            lived.advance(token)
        if number % 10 == 0:
            again = ConstraintState.replay(chosen, tokens)
            assert lived.fault == again.fault
            assert (mask_of(lived)[1] == mask_of(again)[1]).all()


# The compiler: what is remembered, for how long, and who waits.


class Builds:
    """A build that tests command: texts named `slow…` wait for `go`, `bad…` fail, `bug…` break."""

    def __init__(self, compiled: CompiledConstraint) -> None:
        self.compiled = compiled
        self.go = threading.Event()
        self.counts: Counter[str] = Counter()
        self.num_loads = 0

    def load(self) -> Callable[[str], CompiledConstraint]:
        self.num_loads += 1
        return self.build

    def build(self, text: str) -> CompiledConstraint:
        self.counts[text] += 1
        if text.startswith("slow"):
            self.go.wait(60)
        if text.startswith("bad"):
            raise ConstraintError(FinishReason.GRAMMAR_ERROR, f"{text} is bad")
        if text.startswith("bug"):
            raise ZeroDivisionError
        return self.compiled


@pytest.fixture
def builds(compiled) -> Iterator[Builds]:
    made = Builds(compiled["lark"])
    yield made
    made.go.set()


def test_a_text_is_compiled_once_and_then_remembered(builds):
    compiler = ConstraintCompiler(builds.load)
    assert compiler.compile("a") is compiler.compile("a") is builds.compiled
    assert builds.counts == {"a": 1}
    assert builds.num_loads == 1


def test_a_failure_is_remembered_too_and_raised_anew_for_everyone(builds):
    compiler = ConstraintCompiler(builds.load)
    caught = []
    for _ in range(2):
        with pytest.raises(ConstraintError, match="bad one is bad") as error:
            compiler.compile("bad one")
        caught.append(error.value)
    assert caught[0] is not caught[1]
    assert builds.counts == {"bad one": 1}


def test_a_compilation_that_takes_too_long_fails_its_text_for_good_and_lets_others_pass(builds):
    compiler = ConstraintCompiler(builds.load, limit_s=0.05)
    for _ in range(2):
        with pytest.raises(ConstraintError, match=r"longer than 0\.05 s") as error:
            compiler.compile("slow")
        assert error.value.finish is FinishReason.GRAMMAR_TIMEOUT
    assert compiler.compile("quick") is builds.compiled
    builds.go.set()
    compiler._threads.shutdown(wait=True)  # the outcome is there, and too late
    with pytest.raises(ConstraintError, match="longer than"):
        compiler.compile("slow")
    assert builds.counts == {"slow": 1, "quick": 1}


def test_a_request_that_finds_no_free_thread_is_told_so_and_its_text_is_not_to_blame(builds):
    compiler = ConstraintCompiler(builds.load, limit_s=0.05, num_threads=1)
    with pytest.raises(ConstraintError, match="longer than"):
        compiler.compile("slow")
    with pytest.raises(ConstraintError, match="no thread was free") as error:
        compiler.compile("quick")
    assert error.value.finish is FinishReason.GRAMMAR_TIMEOUT
    builds.go.set()
    compiler._threads.shutdown(wait=True)
    assert compiler.compile("quick") is builds.compiled


@pytest.mark.timeout(30)
def test_a_request_that_joins_late_waits_only_for_what_is_left(builds):
    compiler = ConstraintCompiler(builds.load, limit_s=10_000.0)
    job = compiler._job("slow")
    while not job.started_s:
        builds.go.wait(0.001)
    job.started_s -= 20_000.0
    with pytest.raises(ConstraintError, match="longer than"):
        compiler.compile("slow")


def test_two_threads_that_need_the_vocabulary_load_it_once(builds):
    go = threading.Event()

    def load() -> Callable[[str], CompiledConstraint]:
        go.wait(60)
        build: Callable[[str], CompiledConstraint] = builds.load()
        return build

    compiler = ConstraintCompiler(load)
    loads = [compiler.preload() for _ in range(2)]
    while not compiler._threads._work_queue.empty():
        go.wait(0.001)
    go.set()
    assert loads[0].result() == loads[1].result()
    assert builds.num_loads == 1


async def test_the_event_loop_runs_on_while_two_requests_wait_for_one_compilation(builds):
    compiler = ConstraintCompiler(builds.load)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(compiler.compiled("slow"))
        second = group.create_task(compiler.compiled("slow"))
        await asyncio.sleep(0)
        assert len(compiler) == 1
        builds.go.set()  # only a loop that runs gets here
    assert first.result() is second.result() is builds.compiled
    assert builds.counts == {"slow": 1}


async def test_a_request_that_is_cancelled_takes_the_compilation_from_no_other(builds):
    compiler = ConstraintCompiler(builds.load, num_threads=1)
    async with asyncio.TaskGroup() as group:
        blocker = group.create_task(compiler.compiled("slow"))
        cancelled = group.create_task(compiler.compiled("queued"))
        other = group.create_task(compiler.compiled("queued"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        builds.go.set()
    assert cancelled.cancelled()
    assert other.result() is blocker.result() is builds.compiled


async def test_a_slow_compilation_is_the_same_named_error_on_the_event_loop(builds):
    compiler = ConstraintCompiler(builds.load, limit_s=0.05)
    with pytest.raises(ConstraintError, match="longer than"):
        await compiler.compiled("slow")
    with pytest.raises(ConstraintError, match="bad"):
        await compiler.compiled("bad")


def test_no_more_texts_are_remembered_than_the_bound_and_the_last_used_stay(builds):
    compiler = ConstraintCompiler(builds.load, max_cached=3)
    for text in ("a", "b", "c", "a", "d"):
        compiler.compile(text)
        assert len(compiler) <= 3
    compiler.compile("a")
    assert builds.counts["a"] == 1
    compiler.compile("b")
    assert builds.counts["b"] == 2


def test_no_more_text_is_remembered_than_the_bound(builds):
    compiler = ConstraintCompiler(builds.load, max_cached_chars=10)
    for text in ("aaaa", "bbbb", "cccc"):
        compiler.compile(text)
    assert (len(compiler), compiler._num_chars) == (2, 8)
    assert compiler.compile("longer than all") is builds.compiled
    assert (len(compiler), compiler._num_chars) == (0, 0)


def test_a_bug_is_raised_and_not_remembered(builds):
    compiler = ConstraintCompiler(builds.load)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            compiler.compile("bug")
    assert builds.counts["bug"] == 2
    assert (len(compiler), compiler._num_chars) == (0, 0)


def test_many_threads_share_one_compiler(builds):
    compiler = ConstraintCompiler(builds.load, max_cached=4)
    texts = [f"{kind}{number}" for kind in ("a", "bad") for number in range(4)]
    sizes = list[int]()

    def work(seed: int) -> None:
        random = Random(seed)
        for _ in range(150):
            text = random.choice(texts)
            outcome = outcome_of(compiler.compile, text)
            if isinstance(outcome, ConstraintError):
                assert outcome.reason == f"{text} is bad"
            else:
                assert outcome is builds.compiled
                assert not text.startswith("bad")
            sizes.append(len(compiler))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert max(sizes) <= 4 + 1  # a size may be read between an entry and its bound
    assert builds.num_loads == 1


def test_threads_compile_and_follow_real_grammars_at_a_time(build, noise, wish_to_end, vocab):
    compiler = ConstraintCompiler(lambda: build)
    assert compiler.preload().result() is build
    texts = [KINDS[name].text() for name in ("schema", "calls", "lark")]

    def work(seed: int) -> str:
        compiled = compiler.compile(texts[seed % 3])
        return decode(vocab, generate(compiled, noise, wish_to_end, seed // 6))

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(work, range(12)))
    for one, other in pairwise(answers[:6:3] + answers[6::3]):
        assert one
        assert other
    assert answers[0] == answers[3]  # the same text and seed, whoever compiled it
    assert answers[1] == answers[4]
    assert answers[6] == answers[9]
