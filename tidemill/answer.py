"""Shows a Chat Completions stream to a person: reasoning, answer, usage, timeline."""

from __future__ import annotations

from typing import Any, TextIO

from pipeline.client import Event

_DIM, _RED, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[0m"
_BAR = 40  # columns of the timeline's bars


class AnswerPrinter:
    """Feed it the events of one stream. `failed` is True after a named error."""

    def __init__(self, out: TextIO, err: TextIO, *, raw: bool) -> None:
        self._out = out
        self._err = err
        self._raw = raw
        self._colour = out.isatty()
        self._reasoning = False
        self._written = False
        self.failed = False

    def show(self, event: Event) -> None:
        """Print what this event adds."""
        if self._raw:
            self._out.write(event.body.decode() + "\n")
            self._out.flush()
            self.failed = self.failed or b'"error"' in event.body[:10]
            return
        body = event.json()
        if event.number is None:
            self._note(body)
        elif "error" in body:
            self._error(body["error"])
        else:
            self._chunk(body)

    def close(self) -> None:
        """End the last line."""
        self._out.flush()

    def _chunk(self, body: dict[str, Any]) -> None:
        for choice in body.get("choices", []):
            # a whole completion has a message, a chunk a delta
            part = choice.get("delta") or choice.get("message") or {}
            if part.get("reasoning_content"):
                self._write(part["reasoning_content"], reasoning=True)
            if part.get("content"):
                self._write(part["content"], reasoning=False)
        if body.get("usage"):
            self._finish(body)

    def _write(self, text: str, *, reasoning: bool) -> None:
        if self._colour and reasoning != self._reasoning:
            self._out.write(_DIM if reasoning else f"{_RESET}\n")
        self._reasoning = reasoning
        self._written = True
        self._out.write(text)
        self._out.flush()

    def _finish(self, body: dict[str, Any]) -> None:
        usage = body["usage"]
        reasons = ", ".join(str(choice.get("finish_reason")) for choice in body["choices"])
        self._out.write((_RESET if self._colour else "") + ("\n" if self._written else ""))
        self._out.flush()
        self._err.write(
            f"[{reasons}] {usage['prompt_tokens']} prompt tokens ({usage['prompt_cache_hit_tokens']} from cache), "
            f"{usage['completion_tokens']} generated\n"
        )

    def _error(self, error: dict[str, Any]) -> None:
        self.failed = True
        start, end = (_RED, _RESET) if self._err.isatty() else ("", "")
        self._err.write(f"{start}{error.get('code')}: {error.get('message')}{end}\n")

    def _note(self, body: dict[str, Any]) -> None:
        match body.get("type"):
            case "request_timeline":
                self._out.write("\n" if self._written else "")
                self._written = False
                self._out.flush()
                self._err.write(timeline(body["spans"]))
            case "request_progress":
                self._err.write(f"waiting in {body.get('stage')}\n")
            case _:
                pass


def timeline(spans: list[dict[str, Any]]) -> str:
    """A table of the stages of a request: when each began and ended, in ms since the broker stored it."""
    if not spans:
        return ""
    spans = sorted(spans, key=lambda span: int(span["start_ns"]))
    zero = spans[0]["start_ns"]
    total_ns = max(max(span["end_ns"] for span in spans) - zero, 1)
    lines = [f"{'stage':<9} {'worker':<12} {'from ms':>9} {'to ms':>9}\n"]
    for span in spans:
        start, end = span["start_ns"] - zero, max(span["end_ns"], span["start_ns"]) - zero
        left = round(start / total_ns * _BAR)
        bar = " " * left + "#" * max(round((end - start) / total_ns * _BAR), 1)
        label = f"{span['stage']:<9} {span['worker']:<12} {start / 1e6:>9.2f} {end / 1e6:>9.2f}"
        lines.append(f"{label}  |{bar:<{_BAR + 1}}| {span['note']}\n")
    return "".join(lines)
