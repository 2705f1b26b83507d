from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from tidemill.logs import configure


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def test_json_lines_go_to_stderr_with_level_time_and_fields(capsys: pytest.CaptureFixture[str]):
    configure("info", json=True)
    structlog.get_logger().info("worker ready", worker="decode-0")
    captured = capsys.readouterr()
    line = json.loads(captured.err)
    assert captured.out == ""
    assert (line["event"], line["level"], line["worker"]) == ("worker ready", "info", "decode-0")
    assert line["timestamp"].endswith("Z")


def test_what_is_below_the_level_is_dropped_and_a_second_call_changes_it(capsys: pytest.CaptureFixture[str]):
    configure("warning")
    structlog.get_logger().info("too quiet")
    logging.getLogger("nats").info("too quiet as well")
    assert capsys.readouterr().err == ""
    configure("debug")
    structlog.get_logger().debug("heard now")
    logging.getLogger("nats").debug("and this")
    heard = capsys.readouterr().err
    assert "heard now" in heard
    assert "DEBUG nats: and this" in heard


def test_an_exception_is_one_json_line_too(capsys: pytest.CaptureFixture[str]):
    configure("info", json=True)
    try:
        raise KeyError("rid-7")
    except KeyError:
        structlog.get_logger().exception("a bug")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "rid-7" in lines[0]


@pytest.mark.parametrize("json_lines", [False, True])
def test_no_log_line_shows_local_variables_for_they_hold_prompts(capsys: pytest.CaptureFixture[str], json_lines: bool):
    configure("info", json=json_lines)

    def parse(prompt: str) -> int:
        return int(prompt)

    try:
        parse("secret")
    except ValueError:
        structlog.get_logger().exception("a bug")
    written = capsys.readouterr().err
    assert "parse" in written
    assert "prompt = " not in written
    assert '"locals"' not in written


def test_an_unknown_level_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'loud' is none of debug, info, warning, error"):
        configure("loud")
