"""Logging of every process: structlog to stderr, for people or as one JSON object per line."""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str = "info", *, json: bool = False) -> None:
    """Send structlog and the standard library's log to stderr. Call once per process, before the first log line.

    Args:
        level: one of LEVELS; what is below it is dropped before it is formatted.
        json: one JSON object per line, for machines; otherwise aligned text, coloured on a terminal.

    Raises:
        ValueError: `level` is not one of LEVELS.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    threshold = logging.getLevelNamesMapping()[level.upper()]
    # force: a second call (tests, a worker inside another program) replaces the first instead of doing nothing
    logging.basicConfig(level=threshold, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s", force=True)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(json=json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,  # stderr may be replaced (tests); a log line is never on the hot path
    )


def _renderers(*, json: bool) -> list[structlog.typing.Processor]:
    # Tracebacks without local variables: those hold people's prompts, and drawing them takes a second of event loop.
    if json:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
