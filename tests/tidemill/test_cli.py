from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tidemill import commands
from tidemill.cli import app
from tidemill.errors import CommandError, ConfigError

ROOT = Path(__file__).parents[2]
COMMANDS = ["up", "worker", "send", "ps", "cancel", "demo", "topics", "model"]


def tidemill(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidemill", *args], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[commands.SendOptions]:
    seen: list[commands.SendOptions] = []

    def send(options: commands.SendOptions) -> int:
        seen.append(options)
        return 3

    monkeypatch.setattr(commands, "send", send)
    return seen


def test_help_lists_every_command():
    shown = tidemill("--help")
    assert shown.returncode == 0
    assert all(f"│ {name} " in shown.stdout for name in COMMANDS)


def test_help_imports_nothing_heavy():
    script = (
        "import sys, tidemill; sys.argv = ['tidemill', '--help']\n"
        "try: tidemill.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'nats', 'tokenizers', 'msgspec', 'uvloop'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stderr.strip() == "[]"


def test_every_command_and_every_option_is_explained():
    unexplained = []
    groups = [("tidemill", get_command(app))]
    for name, command in groups:
        groups += [(f"{name} {sub}", nested) for sub, nested in getattr(command, "commands", {}).items()]
        unexplained += [f"{name} {param.name}" for param in command.params if not getattr(param, "help", None)]
        if not command.help:
            unexplained.append(name)
    assert unexplained == []
    assert [name for name, _ in groups[1 : 1 + len(COMMANDS)]] == [f"tidemill {name}" for name in COMMANDS]


def test_send_hands_over_what_was_asked_and_returns_its_exit_code(sent: list[commands.SendOptions]):
    args = ["send", "Why?", "--nats", "nats://a:1,nats://b:2", "--seed", "7", "--class", "batch", "--timeout", "2.5"]
    assert CliRunner().invoke(app, args).exit_code == 3
    [options] = sent
    assert options == commands.SendOptions(
        nats=["nats://a:1", "nats://b:2"], prompt="Why?", seed=7, request_class="batch", timeout_s=2.5
    )


def test_send_reads_a_body_from_a_file_or_from_stdin(sent: list[commands.SendOptions], tmp_path: Path):
    file = tmp_path / "body.json"
    file.write_bytes(b'{"messages": []}')
    CliRunner().invoke(app, ["send", "--nats", "nats://a:1", "--file", str(file)])
    CliRunner().invoke(app, ["send", "--nats", "nats://a:1", "-f", "-"], input=b'{"model": "piped"}')
    assert [options.body for options in sent] == [b'{"messages": []}', b'{"model": "piped"}']


@pytest.mark.parametrize("args", [["send"], ["send", "a prompt", "--file", "body.json"]])
def test_send_wants_a_prompt_or_a_file(args: list[str]):
    shown = CliRunner().invoke(app, [*args, "--nats", "nats://a:1"])
    assert shown.exit_code == 2
    assert "give either a prompt or --file" in shown.output


def test_a_body_that_cannot_be_read_is_named(tmp_path: Path):
    missing = tmp_path / "missing.json"
    shown = CliRunner().invoke(app, ["send", "--nats", "nats://a:1", "--file", str(missing)])
    assert shown.exit_code == 1
    assert str(missing) in shown.output


@pytest.mark.parametrize("error", [CommandError("no such worker"), ConfigError("JetStream is not enabled")])
def test_an_error_of_ours_is_one_message_and_its_exit_code(error: CommandError, monkeypatch: pytest.MonkeyPatch):
    def ps(**_: object) -> int:
        raise error

    monkeypatch.setattr(commands, "ps", ps)
    shown = CliRunner().invoke(app, ["ps", "--nats", "nats://a:1"])
    assert shown.exit_code == error.exit_code
    assert shown.output == f"tidemill: {error}\n"


def test_without_a_server_the_message_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shown = CliRunner().invoke(app, ["ps"])
    assert shown.exit_code == 1
    assert "start `tidemill up`" in shown.output


def test_a_malformed_option_is_refused_by_name():
    shown = CliRunner().invoke(app, ["up", "--option", "step_ms"])
    assert shown.exit_code == ConfigError.exit_code
    assert "'step_ms' is not KEY=VALUE" in shown.output


def test_an_unknown_command_and_an_unknown_engine_are_usage_errors():
    assert CliRunner().invoke(app, ["fly"]).exit_code == 2
    assert CliRunner().invoke(app, ["up", "--engine", "steam"]).exit_code == 2


def test_version():
    assert tidemill("--version").stdout == "tidemill 0.1.0\n"


def test_topics_are_linted_drawn_and_listed():
    assert tidemill("topics", "lint").stdout == "topics.yaml: no fault\n"
    assert "lookup" in tidemill("topics", "graph").stdout
    assert tidemill("topics", "table").stdout.startswith("|")


@pytest.mark.parametrize("command", ["lint", "graph", "table"])
def test_a_topics_file_that_cannot_be_read_is_one_message(command: str, tmp_path: Path):
    file = tmp_path / "topics.yaml"
    file.write_bytes(b"version: 1 # \xe4")
    shown = CliRunner().invoke(app, ["topics", command, str(file)])
    assert shown.exit_code == 1
    assert shown.output.startswith("tidemill: ")
    assert str(file) in shown.output.replace("\n", "")


def test_a_faulty_topics_file_is_told_and_fails(tmp_path: Path):
    file = tmp_path / "topics.yaml"
    file.write_text("version: 1\nstages: {}\nsurprise: true\n")
    for command in ("lint", "graph"):
        shown = CliRunner().invoke(app, ["topics", command, str(file)])
        assert shown.exit_code == 1
        assert "surprise" in shown.output
