"""The request of the hop bench: a turn of a chat with a system prompt that all share and a short question of its own.

So the codec's segment cache and the prefix cache work as they do for an agent; the body has about 1 KiB.
"""

from __future__ import annotations

import json
import secrets

MODEL = "deepseek-v4.1-flash"
SYSTEM = (
    "You are the assistant of a small library. You know its catalogue, its opening hours and its rules of lending. "
    "Answer in one short paragraph, name the shelf when you name a book, and say so when you do not know. "
    "Never recommend a book that is lent out; offer to reserve it instead and tell when it is due back. "
    "Readers under sixteen may borrow from the shelves A to K without asking, from the others with a parent. "
    "Fines are never discussed in writing: refer to the desk, which is open from nine to six on weekdays. "
    "When a reader asks about another reader, refuse and explain that the library keeps such data to itself. "
    "Quote at most two sentences of a book. Do not translate whole pages. Use the reader's language. "
    "Dates are written with the name of the month; prices are in crowns. "
)


def body(max_tokens: int) -> bytes:
    """A Chat Completions body that streams exactly `max_tokens` tokens; no two are the same."""
    question = f"Reader {secrets.token_hex(4)} asks: which shelf has the tide tables?"
    return json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "stream": True,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
    ).encode()
