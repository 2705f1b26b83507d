from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deepseek_recipe as recipe  # the reference: its own encoding of the same prompt
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from codec.segments import SegmentCache
from codec.tokenizer import PIECE_CHARS, PromptTokenizer, pieces
from codec.vocab import Vocabulary, load_vocabulary

ROOT = Path(__file__).parents[2]
_VOCABULARY = load_vocabulary()
_PLAIN = Tokenizer.from_str(_VOCABULARY.tokenizer_json)


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Vocabulary) -> PromptTokenizer:
    return PromptTokenizer(vocabulary, SegmentCache(1 << 20))


@pytest.fixture(scope="module")
def reference(vocabulary: Vocabulary) -> recipe.DeepseekV41Encoding:
    """Recipe's encoder with V4.1's added vocabulary put back."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    parts = msgspec.json.decode(vocabulary.tokenizer_json, type=dict[str, msgspec.Raw])
    added = [{"id": token_id, "content": spelling, **flags} for spelling, token_id in vocabulary.added.items()]
    parts["added_tokens"] = msgspec.Raw(msgspec.json.encode(added))
    return recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_str(msgspec.json.encode(parts).decode()))


def convert(body: bytes) -> recipe.Conversation:
    options = recipe.ConversionOptions().with_model_alias("deepseek-v4.1-flash", recipe.ModelVersion.DeepseekV41Flash)
    return recipe.ChatCompletionRequest(body).convert(options).conversation


def test_an_agent_conversation_has_the_ids_of_the_reference(
    tokenizer: PromptTokenizer, reference: recipe.DeepseekV41Encoding
):
    conversation = convert((ROOT / "tests/data/agent_request.json").read_bytes())
    rendered = reference.render_conversation(conversation)
    ids = tokenizer.encode(rendered.prompt, rendered.special_ranges)
    assert ids.tolist() == reference.encode(conversation)
    assert ids.dtype == "uint32"


@given(st.lists(st.text(max_size=60), min_size=1, max_size=4))
def test_any_text_has_the_ids_of_the_reference(
    tokenizer: PromptTokenizer, reference: recipe.DeepseekV41Encoding, texts: list[str]
):
    messages = [recipe.UserMessage(text) for text in texts]
    conversation = recipe.Conversation(messages, thinking_mode=False)
    rendered = reference.render_conversation(conversation)
    assert tokenizer.encode(rendered.prompt, rendered.special_ranges).tolist() == reference.encode(conversation)


def test_cached_ids_are_the_ids(vocabulary: Vocabulary):
    warm = PromptTokenizer(vocabulary, SegmentCache(1 << 20))
    cold = PromptTokenizer(vocabulary, SegmentCache(0))
    prompt = "<｜User｜>High  water\n\n at 6:42<｜Assistant｜>"
    ranges = [(0, 8), (len(prompt) - 13, len(prompt))]
    first, second = warm.encode(prompt, ranges), warm.encode(prompt, ranges)
    assert first.tolist() == second.tolist() == cold.encode(prompt, ranges).tolist()
    assert first[0] == 128_803
    assert first[-1] == 128_804
    assert (warm.cache.num_hits, warm.cache.num_misses) == (1, 1)
    assert not first.flags.writeable


def test_a_control_spelling_outside_the_ranges_is_letters(tokenizer: PromptTokenizer):
    assert tokenizer.encode("<｜User｜>", []).tolist() == [30, 28217, 6756, 28217, 32]
    assert tokenizer.encode("<｜User｜>", [(0, 8)]).tolist() == [128_803]


def test_a_long_segment_is_cut_where_it_changes_no_id():
    text = "".join(path.read_text() for path in sorted(ROOT.glob("codec/*.py")))
    parts = list(pieces(text))
    assert len(parts) > 2
    assert "".join(parts) == text
    assert [i for part in parts for i in _PLAIN.encode(part).ids] == _PLAIN.encode(text).ids


def test_blank_lines_are_not_torn_apart():
    text = "a" * PIECE_CHARS + "\n\n\n  b\nc"
    parts = list(pieces(text))
    assert parts[-1] == "c"
    assert [i for part in parts for i in _PLAIN.encode(part).ids] == _PLAIN.encode(text).ids


@given(st.text(alphabet=" \t\n\r\x0b\x85\u3000.,;(a1é中\u0301", max_size=30), st.text(max_size=10))
def test_a_cut_changes_no_id_whatever_stands_around_it(before: str, after: str):
    before += "\n"
    if after[:1].strip():
        joined = _PLAIN.encode(before + after).ids
        assert _PLAIN.encode(before).ids + _PLAIN.encode(after).ids == joined


def test_a_text_without_a_place_to_cut_stays_whole():
    text = "a" * (3 * PIECE_CHARS)
    assert list(pieces(text)) == [text]


def test_threads_get_the_same_ids(tokenizer: PromptTokenizer):
    texts = [f"berth {i % 7}: {'tide ' * (i % 5)}" for i in range(200)]
    alone = [tokenizer.encode(text, []).tolist() for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert [ids.tolist() for ids in pool.map(lambda text: tokenizer.encode(text, []), texts)] == alone


def test_a_text_that_cannot_be_cut_stops_no_other_thread(vocabulary: Vocabulary):
    """A ratio within one run: the longest pause of another thread against the whole time of encoding."""
    tokenizer = PromptTokenizer(vocabulary, SegmentCache(1 << 20))
    with ThreadPoolExecutor(1) as pool:
        started = last = time.monotonic()
        longest = 0.0
        encoding = pool.submit(tokenizer.encode, "m " * 1_000_000, [])
        while not encoding.done():
            time.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert len(encoding.result()) >= 1_000_000
        assert longest < 0.5 * (last - started)


def test_encoding_starts_no_thread_pool():
    code = (
        "import os; from codec.codec import Codec; codec = Codec.load({}); before = len(os.listdir('/proc/self/task'));"
        "codec.tokenizer.encode('word ' * 20_000, []); print(len(os.listdir('/proc/self/task')) - before)"
    )
    env = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
