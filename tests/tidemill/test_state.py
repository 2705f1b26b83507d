from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.errors import CommandError
from tidemill.state import UpState, find_nats, new_log_dir, read_state, remove_state, state_path, write_state


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def state(pid: int = os.getpid(), nats: tuple[str, ...] = ("nats://127.0.0.1:4333",)) -> UpState:
    return UpState(pid=pid, nats=nats, log_dir="/tmp/logs-of-a-test")


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_up_wrote_is_found_until_it_takes_it_back():
    write_state(state())
    assert read_state() == state()
    assert find_nats([]) == ["nats://127.0.0.1:4333"]
    remove_state(os.getpid())
    assert read_state() is None


def test_named_servers_win_and_may_be_lists():
    write_state(state())
    assert find_nats(["nats://a:1,nats://b:2", "nats://c:3"]) == ["nats://a:1", "nats://b:2", "nats://c:3"]


def test_with_nothing_running_the_error_says_both_remedies():
    with pytest.raises(CommandError, match=r"start `tidemill up`, or name a server with --nats"):
        find_nats([])


def test_word_left_by_a_process_that_died_is_not_believed():
    write_state(state(pid=dead_pid()))
    assert read_state() is None


def test_one_up_does_not_take_back_the_word_of_another():
    write_state(state(nats=("nats://127.0.0.1:4444",)))
    remove_state(os.getpid() + 1)
    assert find_nats([]) == ["nats://127.0.0.1:4444"]


@pytest.mark.parametrize("rubbish", ["", "[]", '{"pid": "many"}', '{"pid": 1}', "\x00"])
def test_a_broken_state_file_counts_as_none(rubbish: str):
    state_path().parent.mkdir()
    state_path().write_text(rubbish)
    assert read_state() is None


def test_without_a_runtime_folder_the_cache_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert state_path() == tmp_path / "cache" / "tidemill" / "up.json"


def test_the_logs_of_the_last_ten_runs_are_kept(tmp_path: Path):
    runs = tmp_path / "cache" / "tidemill" / "logs"
    for number in range(15):
        (runs / f"20200101-0000{number:02}-7").mkdir(parents=True)
    newest = new_log_dir()
    kept = sorted(path.name for path in runs.iterdir())
    assert kept == [*(f"20200101-0000{number:02}-7" for number in range(6, 15)), newest.name]
