"""Text -> ids of the byte-level BPE, without control tokens: the official library, and a faster one where they agree.

`tuetoken` gives the ids of `tokenizers` in a tenth of the time, and touches far less memory for a short text. The two
know different versions of Unicode: they differ for characters that 15.1 and 16.0 added (measured, all of the first two
planes: 5,106 characters, all of them new ones), so text that has any but long-settled characters goes to the official
one. And it is young: it serves only after it has given the official ids of `PROBES` in this process.
Source: facts-codec (segment-parallel tokenisation).
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

from tokenizers import Tokenizer

Bpe = Callable[[str], bytes]  # text -> its ids, u32le; safe to call from several threads, releases the GIL

# Read when the first batch is encoded: a thread pool for single texts would only take cores from the event loop.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Characters (first, last) on which every Unicode version of the last years agrees, and for which a test compares both
# libraries one by one: the basic plane without its late additions, and the older emoji.
SETTLED = (
    (0x0000, 0x1B4D), (0x1D00, 0x2426), (0x2440, 0x2FEF), (0x3000, 0xA7CA), (0xA800, 0xD7FF), (0xE000, 0xFFFF),
    (0x1F300, 0x1F6D2), (0x1F900, 0x1F9FF),
)  # fmt: skip
_UNSETTLED = re.compile("[^" + "".join(f"{chr(low)}-{chr(high)}" for low, high in SETTLED) + "]")

_SCRIPTS = (
    (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x5FF), (0x600, 0x780), (0x900, 0xE80), (0x1100, 0x1200), (0x2000, 0x2426),
    (0x3040, 0x3130), (0x4E00, 0xA000), (0xAC00, 0xD7A4), (0xFE00, 0x10000), (0x1F300, 0x1F650),
)  # fmt: skip
_BETWEEN = (" ", "  ", "\n", "\r\n", "\n\n  ", "\t", "\u00a0", "\u3000", "", "", "'s", ".", "1")


def _mixture(num_runs: int) -> str:
    """Runs of characters of all scripts, with blanks and line ends of every kind between them."""
    random = Random(41)  # noqa: S311 -- the same probe in every process
    parts: list[str] = []
    for _ in range(num_runs):
        low, end = random.choice(_SCRIPTS)
        parts += [chr(random.randrange(low, end)) for _ in range(random.randint(1, 7))]
        parts.append(random.choice(_BETWEEN))
    return "".join(parts)


PROBES: tuple[str, ...] = (
    "The tide turns at 06:42, twice a day; it's 1234567 litres & 3.14159 m³.\n\n  Don't you'll WE'VE",
    "def f(x: int) -> str:\n    return f'{x:>08.3f}'  # naïve\n\tif not x:\r\n\t\tpass\n\n\n",
    '{"a": [1, -2.5e-10, null], "ключ": "значение", "鍵": "値"}',
    "<｜User｜>hello<｜Assistant｜></think><｜begin▁of▁sentence｜>",  # letters to both, or none serves
    "a" * 300 + " " * 300 + "\n" * 300 + "0" * 300 + "é" * 300 + "漢" * 300 + "👩‍👩‍👧‍👦" * 50,
    "\x00\x01\x7f\u200b\u200d\ufeff\u2028\u2029\x85e\u0301\u0e33\u0f71",
    _mixture(3_000),
)


def load_bpe(tokenizer_json: str) -> Bpe:
    """The fastest encoder that gives the official ids. Blocks 0.6 s, 0.2 s of it with the GIL: load before serving."""
    official = official_bpe(tokenizer_json)
    fast = fast_bpe(tokenizer_json)
    return chosen_bpe(fast, official) if fast is not None and agree(fast, official) else official


def chosen_bpe(fast: Bpe, official: Bpe) -> Bpe:
    """`fast` for settled characters, `official` for any text with others."""

    def bpe(text: str) -> bytes:
        return fast(text) if text.isascii() or not _UNSETTLED.search(text) else official(text)

    return bpe


def agree(one: Bpe, other: Bpe) -> bool:
    """Whether both give the same ids for every probe. 40 ms."""
    return all(one(probe) == other(probe) for probe in PROBES)


def official_bpe(tokenizer_json: str) -> Bpe:
    """`tokenizers`. Only its batch calls release the GIL: `encode` of 2 MB stopped every other thread for 2 s."""
    encode = Tokenizer.from_str(tokenizer_json).encode_batch_fast

    def bpe(text: str) -> bytes:
        (encoding,) = encode([text], add_special_tokens=False)
        return array("I", encoding.ids).tobytes()  # three times faster than numpy from a list

    return bpe


def fast_bpe(tokenizer_json: str) -> Bpe | None:
    """`tuetoken`, None where it is not installed or does not take this file."""
    try:
        import tuetoken  # noqa: PLC0415 -- it may be absent

        with _as_file(tokenizer_json.encode()) as path:
            bpe: Bpe = tuetoken.Tokenizer(path).encode_to_bytes
    except (ImportError, OSError, ValueError):
        return None
    return bpe


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path under which `data` can be read; it lies in memory, on no disk."""
    fd = os.memfd_create("tokenizer.json")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
