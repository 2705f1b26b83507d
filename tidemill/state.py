"""Where `tidemill up` leaves word, so that `send`, `ps` and `cancel` find its NATS server without being told."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.errors import CommandError

LOG_RUNS_KEPT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class UpState:
    """A running `tidemill up`: its process id, its NATS URLs and the folder of its logs."""

    pid: int
    nats: tuple[str, ...]
    log_dir: str


def cache_dir() -> Path:
    """Our folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill"


def state_path() -> Path:
    """The state file: in the user's runtime folder, which a reboot empties, where there is one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "tidemill" if runtime and Path(runtime).is_dir() else cache_dir()
    return folder / "up.json"


def write_state(state: UpState) -> None:
    """Leave word; the last `tidemill up` to start is the one that is found."""
    path = state_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"up.{state.pid}.json")
    new.write_text(json.dumps(asdict(state)), encoding="utf-8")
    new.replace(path)  # a reader never sees half a file


def read_state() -> UpState | None:
    """What the running `tidemill up` left, or None when none runs."""
    try:
        found = json.loads(state_path().read_text(encoding="utf-8"))
        state = UpState(pid=int(found["pid"]), nats=tuple(found["nats"]), log_dir=str(found["log_dir"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return state if _alive(state.pid) else None


def remove_state(pid: int) -> None:
    """Take our word back, unless another has replaced it."""
    state = read_state()
    if state is not None and state.pid == pid:
        state_path().unlink(missing_ok=True)


def find_nats(named: Sequence[str]) -> list[str]:
    """The NATS URLs to use: those named (each may be a comma-separated list), else those of the running `tidemill up`.

    Raises:
        CommandError: none named and none running.
    """
    urls = [url for text in named for url in text.split(",") if url]
    if urls:
        return urls
    state = read_state()
    if state is None:
        raise CommandError("no NATS server known: start `tidemill up`, or name a server with --nats nats://HOST:PORT")
    return list(state.nats)


def new_log_dir() -> Path:
    """A fresh folder for the logs of one run; those of the last ten runs are kept."""
    runs = cache_dir() / "logs"
    runs.mkdir(parents=True, exist_ok=True)
    for old in sorted(runs.iterdir())[: -LOG_RUNS_KEPT + 1]:  # names sort by time
        shutil.rmtree(old, ignore_errors=True)
    folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return folder


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
