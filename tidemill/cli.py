"""The `tidemill` command line: arguments in, one call out. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill import __version__
from tidemill.errors import CommandError, ConfigError
from tidemill.logs import LEVELS

if TYPE_CHECKING:  # importing it takes long
    from pipeline.topology import Topology

app = typer.Typer(
    help="An event-driven LLM serving pipeline over NATS: prefill, handoff, decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # what is not a CommandError is a bug: its plain traceback says the most
    context_settings={"help_option_names": ["-h", "--help"]},
)
topics_app = typer.Typer(
    help="Check and draw topics.yaml, the only source of subjects and limits.", no_args_is_help=True
)
app.add_typer(topics_app, name="topics")
model_app = typer.Typer(help="Look into a checkpoint without a pipeline.", no_args_is_help=True)
app.add_typer(model_app, name="model")


class Engine(StrEnum):
    """Which engine prefill and decode run."""

    TORCH = "torch"
    STUB = "stub"


class RequestClass(StrEnum):
    """Which of the two queues a request waits in."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Protocol(StrEnum):
    """What a request body is written in."""

    CHAT_COMPLETIONS = "chat_completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COMPLETIONS = "completions"


NatsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--nats", envvar="TIDEMILL_NATS", metavar="URL[,URL]", help="NATS servers (default: those of `tidemill up`)."
    ),
]
EngineOption = Annotated[
    Engine, typer.Option("--engine", help="torch: the real architecture. stub: for benches; its text is not language.")
]
TenantOption = Annotated[str, typer.Option("--tenant", help="Whose request it is.")]
LevelOption = Annotated[str, typer.Option("--log-level", help=f"One of {', '.join(LEVELS)}.")]
KeyValues = Annotated[
    list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="A setting for the workers; may be repeated.")
]


def run() -> None:
    """Run the command that `sys.argv` names and exit."""
    app()


@contextmanager
def _errors_shown() -> Iterator[None]:
    """Show a CommandError as one message on stderr and exit with its code."""
    try:
        yield
    except CommandError as error:
        typer.echo(f"tidemill: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


def _print_version(*, wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidemill {__version__}")
        raise typer.Exit


def _report(line: str) -> None:
    typer.echo(f"tidemill: {line}", err=True)


def _split(texts: list[str] | None) -> tuple[str, ...]:
    return tuple(url for text in texts or () for url in text.split(",") if url)


def _pairs(texts: list[str] | None) -> dict[str, str]:
    """KEY=VALUE texts as a dict.

    Raises:
        ConfigError: one has no `=`.
    """
    pairs = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--option {text!r} is not KEY=VALUE")
        pairs[key] = value
    return pairs


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version and exit.",
            is_eager=True,
            callback=lambda value: _print_version(wanted=value),
        ),
    ] = False,
) -> None:
    pass


@app.command()
def up(
    *,
    engine: EngineOption = Engine.TORCH,
    nats: NatsOption = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    codec: Annotated[int, typer.Option(min=0, help="Codec workers; each parses too.")] = 1,
    lookup: Annotated[int, typer.Option(min=0, help="Lookup workers.")] = 1,
    store_dir: Annotated[
        Path | None,
        typer.Option(help="Where the embedded NATS server keeps accepted requests (default: removed at the end)."),
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="One log per worker (default: in the user's cache).")] = None,
    log_level: LevelOption = "info",
    option: KeyValues = None,
) -> None:
    """Run a supervised set of workers on this machine, with an embedded NATS server unless --nats names one."""
    from tidemill.up import UpOptions, serve  # noqa: PLC0415 - --help stays quick

    with _errors_shown():
        options = UpOptions(
            engine=engine.value,
            nats=_split(nats),
            counts={"prefill": prefill, "decode": decode, "codec": codec, "lookup": lookup},
            store_dir=store_dir,
            log_dir=log_dir,
            log_level=log_level,
            options=_pairs(option),
        )
        asyncio.run(serve(options, say=typer.echo, report=_report))


@app.command()
def worker(
    stages: Annotated[list[str], typer.Argument(metavar="STAGE...", help="The stages that this process runs.")],
    *,
    nats: NatsOption = None,
    engine: EngineOption = Engine.TORCH,
    worker_id: Annotated[str | None, typer.Option("--id", help="Its name in beacons (default: made up).")] = None,
    log_level: LevelOption = "info",
    log_json: Annotated[bool, typer.Option(help="Log one JSON object per line.")] = False,
    option: KeyValues = None,
) -> None:
    """Run one worker process until SIGTERM, then finish what it holds and exit."""
    from tidemill.logs import configure  # noqa: PLC0415 - --help stays quick
    from tidemill.state import find_nats  # noqa: PLC0415
    from tidemill.worker import run_worker  # noqa: PLC0415

    with _errors_shown():
        try:
            configure(log_level, json=log_json)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        raise typer.Exit(run_worker(stages, find_nats(nats or ()), engine.value, worker_id, _pairs(option)))


@app.command()
def send(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; or give a whole body with --file.")] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A request body (JSON), sent as it is; - reads stdin.")
    ] = None,
    nats: NatsOption = None,
    protocol: Annotated[
        Protocol, typer.Option(help="What the body of --file is written in.")
    ] = Protocol.CHAT_COMPLETIONS,
    model: Annotated[str | None, typer.Option(help="Model name (default: deepseek-v4.1-flash).")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens (default: 128).")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same answer.")] = None,
    request_class: Annotated[
        RequestClass, typer.Option("--class", help="Which queue it waits in.")
    ] = RequestClass.INTERACTIVE,
    tenant: TenantOption = "default",
    rid: Annotated[str | None, typer.Option(help="32 hex digits; the same one again is the same request.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0.001, metavar="SECONDS", help="Its deadline.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print one JSON event per line instead of the text.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Show when each stage had it.")] = False,
) -> None:
    """Send one request and stream its answer."""
    from tidemill import commands  # noqa: PLC0415 - --help stays quick
    from tidemill.state import find_nats  # noqa: PLC0415

    if (prompt is None) == (file is None):
        raise typer.BadParameter("give either a prompt or --file")
    if prompt is not None and not prompt.strip():
        raise typer.BadParameter("the prompt is empty")
    overrides = {"--model": model, "--system": system, "--max-tokens": max_tokens, "--temperature": temperature}
    given = [name for name, value in {**overrides, "--seed": seed}.items() if value is not None]
    if file is not None and given:
        raise typer.BadParameter(f"--file is sent as it is: put {', '.join(given)} into it")
    with _errors_shown():
        options = commands.SendOptions(
            nats=find_nats(nats or ()),
            prompt=prompt,
            body=None if file is None else _body(file),
            protocol=protocol.value,
            model=model,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            request_class=request_class.value,
            tenant=tenant,
            rid=rid,
            timeout_s=timeout,
            raw=raw,
            timeline=timeline,
        )
        raise typer.Exit(commands.send(options))


def _body(file: Path) -> bytes:
    """The request body that --file names.

    Raises:
        CommandError: it cannot be read.
    """
    if str(file) == "-":
        return sys.stdin.buffer.read()
    try:
        return file.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read the request body: {error}") from None


@app.command()
def ps(
    *, nats: NatsOption = None, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """List the workers and their load."""
    from tidemill import commands  # noqa: PLC0415 - --help stays quick
    from tidemill.state import find_nats  # noqa: PLC0415

    with _errors_shown():
        raise typer.Exit(commands.ps(nats=find_nats(nats or ()), as_json=as_json))


@app.command()
def cancel(
    rid: Annotated[str, typer.Argument(help="The request to end.")],
    *,
    nats: NatsOption = None,
    tenant: TenantOption = "default",
) -> None:
    """Cancel a request, wherever it is."""
    from tidemill import commands  # noqa: PLC0415 - --help stays quick
    from tidemill.state import find_nats  # noqa: PLC0415

    with _errors_shown():
        raise typer.Exit(commands.cancel(nats=find_nats(nats or ()), rid=rid, tenant=tenant))


@app.command()
def demo(
    *,
    engine: EngineOption = Engine.TORCH,
    body: Annotated[Path | None, typer.Option(help="Another request body than ours.")] = None,
) -> None:
    """Start everything, send one real agent request, stream its answer, show its timeline, stop everything."""
    from tidemill import commands  # noqa: PLC0415 - --help stays quick

    with _errors_shown():
        raise typer.Exit(commands.demo(engine=engine.value, body_path=body))


TopicsFile = Annotated[
    Path | None, typer.Argument(exists=True, dir_okay=False, help="Another file than the installed topics.yaml.")
]


@topics_app.command()
def lint(file: TopicsFile = None) -> None:
    """Check topics.yaml and that the code agrees with it: every fault in one list."""
    from pipeline import lint as rules  # noqa: PLC0415 - --help stays quick
    from pipeline.topology import TopologyError  # noqa: PLC0415

    with _errors_shown():
        try:
            faults = rules.lint(file, check_code=True)
        except TopologyError as error:
            raise CommandError(str(error)) from None
        for fault in faults:
            typer.echo(fault, err=True)
        if faults:
            raise typer.Exit(1)
        typer.echo("topics.yaml: no fault")


@topics_app.command()
def graph(file: TopicsFile = None) -> None:
    """Print the Mermaid diagram of the README."""
    from pipeline import drawing  # noqa: PLC0415 - --help stays quick

    typer.echo(drawing.graph(_topology(file)))


@topics_app.command()
def table(file: TopicsFile = None) -> None:
    """Print all topics as a Markdown table."""
    from pipeline import drawing  # noqa: PLC0415 - --help stays quick

    typer.echo(drawing.table(_topology(file)))


@model_app.command()
def logits(
    checkpoint_dir: Annotated[Path, typer.Argument(file_okay=False, help="config.json and *.safetensors.")],
    *,
    ids: Annotated[Path, typer.Option(help="Token ids, .npy of one row.")],
    out: Annotated[Path, typer.Option(help="Where to write fp32 [positions, vocabulary], .npy.")],
    keep: Annotated[
        int | None,
        typer.Option(help="Run the decoder half on the last so many positions only, as serving does (default: all)."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of torch; the last bits are repeatable with one only.")] = 1,
) -> None:
    """Run one prefill and write the logits of every position."""
    from tidemill import model  # noqa: PLC0415 - --help stays quick

    with _errors_shown():
        _report(model.logits(checkpoint_dir, ids, out, keep=keep, threads=threads))


def _topology(file: Path | None) -> Topology:
    from pipeline.topology import Topology, TopologyError  # noqa: PLC0415 - --help stays quick

    with _errors_shown():
        try:
            return Topology.load(file)
        except TopologyError as error:
            raise CommandError(str(error)) from None
