"""What `tidemill send`, `ps`, `cancel` and `demo` do, over `pipeline.client`. Each returns an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import CommandError


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """What `tidemill send` was asked to send and how to show the answer.

    Either `prompt`, with the sampling fields that are not None, or `body`: a whole request body, sent as it is.
    """

    nats: Sequence[str]
    prompt: str | None = None
    body: bytes | None = None
    protocol: str = "chat_completions"
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    request_class: str = "interactive"
    tenant: str = "default"
    rid: str | None = None
    timeout_s: float | None = None
    raw: bool = False  # one JSON event per line instead of the text
    timeline: bool = False


def send(options: SendOptions) -> int:
    """Publish one request and stream its answer to stdout.

    Raises:
        CommandError: no server, or the request cannot be published.
    """
    raise CommandError(f"sending to {options.nats} is not built yet")


def ps(*, nats: Sequence[str], as_json: bool) -> int:
    """List the workers whose beacons are heard, with their load.

    Raises:
        CommandError: no server.
    """
    raise CommandError(f"listing the workers of {nats} is not built yet (json: {as_json})")


def cancel(*, nats: Sequence[str], rid: str, tenant: str) -> int:
    """Cancel a request wherever it is.

    Raises:
        CommandError: no server.
    """
    raise CommandError(f"cancelling {rid} of {tenant} at {nats} is not built yet")


def demo(*, engine: str, body_path: Path | None) -> int:
    """Start a set, send one real agent request, show its answer and its timeline, stop the set.

    Raises:
        CommandError: the set cannot be started.
    """
    raise CommandError(f"the demo of the {engine} engine with {body_path} is not built yet")
