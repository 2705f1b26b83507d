"""What `tidemill send`, `ps`, `cancel` and `demo` do, over `pipeline.client`. Each returns an exit code."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import uvloop

from pipeline.bus import Bus
from pipeline.client import Client, StreamLostError
from pipeline.errors import RequestError, SetupError, TidemillError
from pipeline.membership import Membership
from pipeline.topology import Topology, TopologyError
from tidemill.answer import AnswerPrinter
from tidemill.errors import CommandError
from tidemill.up import UpOptions, local_set

DEFAULT_MODEL = "deepseek-v4.1-flash"
LISTEN_S = 0.5  # five beacons; every live worker has spoken by then
LISTEN_FOR_COUNTERS_S = 1.2  # counters ride on every tenth beacon: one comes each second
DEMO_TIMEOUT_S = 300.0

EXIT_REQUEST_FAILED = 2  # the request ended with a named error


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
    return _run(_send(options))


def ps(*, nats: Sequence[str], as_json: bool) -> int:
    """List the workers whose beacons are heard, with their load.

    Raises:
        CommandError: no server.
    """
    return _run(_ps(nats, as_json=as_json))


def cancel(*, nats: Sequence[str], rid: str, tenant: str) -> int:
    """Cancel a request wherever it is.

    Raises:
        CommandError: no server, or nobody owns that request.
    """
    return _run(_cancel(nats, rid, tenant))


def demo(*, engine: str, body_path: Path | None) -> int:
    """Start a set, send one real agent request, show its answer and its timeline, stop the set.

    Raises:
        CommandError: the set cannot be started.
    """
    path = body_path or Path(__file__).with_name("demo_request.json")
    try:
        body = path.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read the request body: {error}") from error
    return _run(_demo(engine, body))


def check_rid(rid: str) -> str:
    """A request id as people paste it: 32 hex digits, with or without the `chatcmpl-` of an answer's id.

    Raises:
        CommandError: it is none.
    """
    bare = rid.removeprefix("chatcmpl-")
    if not re.fullmatch(r"[0-9a-f]{32}", bare):
        raise CommandError(f"{rid!r} is no request id: 32 hex digits are")
    return bare


def _run(work: Coroutine[Any, Any, int]) -> int:
    try:
        return uvloop.run(work)
    except (SetupError, RequestError, TopologyError) as error:
        raise CommandError(str(error)) from error
    except TidemillError as error:
        raise CommandError(f"{type(error).__name__}: {error}") from error


def request_body(options: SendOptions) -> bytes:
    """The body to send: the one given, or a Chat Completions body around the prompt."""
    if options.body is not None:
        return options.body
    messages = [{"role": "system", "content": options.system}] if options.system is not None else []
    body: dict[str, Any] = {
        "model": options.model or DEFAULT_MODEL,
        "messages": [*messages, {"role": "user", "content": options.prompt or ""}],
        "stream": True,
        "max_tokens": options.max_tokens or 128,
    }
    for name in ("temperature", "seed"):
        if getattr(options, name) is not None:
            body[name] = getattr(options, name)
    return json.dumps(body, ensure_ascii=False).encode()


async def _send(options: SendOptions) -> int:
    async with await Client.connect(options.nats, options.tenant) as client:
        stream = await client.publish(
            request_body(options),
            protocol=options.protocol,
            request_class=options.request_class,
            timeout_s=options.timeout_s,
            rid=None if options.rid is None else check_rid(options.rid),
            timeline=options.timeline,
        )
        printer = AnswerPrinter(sys.stdout, sys.stderr, raw=options.raw)
        try:
            async for event in stream:
                printer.show(event)
        except StreamLostError as error:
            raise CommandError(str(error)) from error
        except asyncio.CancelledError:
            client.cancel(stream.rid)  # Ctrl-C: the engines stop too
            typer.echo(f"\ncancelled {stream.rid}", err=True)
            raise
        printer.close()
        if not options.raw:
            typer.echo(f"request {stream.rid}", err=True)
        return EXIT_REQUEST_FAILED if printer.failed else 0


async def _ps(nats: Sequence[str], *, as_json: bool) -> int:
    bus = await Bus.connect(nats, "ps", Topology.load(), single=True)
    membership = Membership(bus)
    counters: dict[str, dict[str, int]] = {}
    membership.on_change.append(lambda b: counters.update({b.worker: b.counters} if b.counters else {}))
    await asyncio.sleep(LISTEN_FOR_COUNTERS_S if as_json else LISTEN_S)
    await bus.close()
    beacons = sorted((member.beacon for member in membership), key=lambda b: (b.roles, b.worker))
    if as_json:
        rows = [
            {name: getattr(b, name) for name in b.__struct_fields__ if name not in ("ticket", "counters")}
            | {"counters": counters.get(b.worker, {})}
            for b in beacons
        ]
        typer.echo(json.dumps({"workers": rows}, indent=1))
        return 0
    if not beacons:
        typer.echo("no worker is heard", err=True)
        return 1
    typer.echo(f"{'WORKER':<16} {'STAGES':<18} {'STATE':<9} {'RUNNING':>7} {'QUEUED':>6} {'FREE':>5} {'KV':>4}  MODEL")
    for b in beacons:
        state = "draining" if b.draining else "serving"
        load = f"{b.running:>7} {b.queued:>6} {b.free_slots:>5} {b.kv_used:>4.0%}" if b.model else " " * 25
        typer.echo(f"{b.worker:<16} {'+'.join(b.roles):<18} {state:<9} {load}  {b.model}")
    return 0


async def _cancel(nats: Sequence[str], rid: str, tenant: str) -> int:
    rid = check_rid(rid)
    async with await Client.connect(nats, tenant) as client:
        if not await client.cancel_and_wait(rid):
            raise CommandError(f"no owner answered for {rid}: it has ended, or is not of tenant {tenant!r}")
    typer.echo(f"cancelled {rid}")
    return 0


async def _demo(engine: str, body: bytes) -> int:
    def report(line: str) -> None:
        typer.echo(f"  {line}", err=True)

    typer.echo(f"tidemill demo: starting nats-server and four workers ({engine} engine)")
    async with local_set(UpOptions(engine=engine, log_level="warning"), report=report) as running:
        await running.wait_ready(report)
        request = json.loads(body)
        typer.echo(f"sending {len(body)} bytes: {_describe(request)}\n")
        options = SendOptions(nats=running.nats, body=body, timeline=True, timeout_s=DEMO_TIMEOUT_S)
        code = await _send(options)
        typer.echo("\nstopping")
    return code


def _describe(request: dict[str, Any]) -> str:
    messages = request.get("messages", [])
    roles = ", ".join(message.get("role", "?") for message in messages)
    return f"{len(request.get('tools', []))} tools, {len(messages)} messages ({roles})"
