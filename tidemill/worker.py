"""`tidemill worker STAGE...`: one process with the stages that topics.yaml names. Returns when it has drained."""

from __future__ import annotations

import asyncio
import gc
import importlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import uvloop

from pipeline.errors import SetupError
from pipeline.topology import Topology, TopologyError
from pipeline.worker import Worker
from tidemill.engine_options import EngineOptions
from tidemill.errors import ConfigError
from tidemill.heartbeat import beat

log = structlog.get_logger()

SERVED_MODELS = {"deepseek-v4.1-flash": "DeepSeek-V4.1-Flash"}
ENGINE_STAGES = ("prefill", "decode")
INDEX_BYTES = 512 << 20  # of a lookup worker's prefix index: ~1.5 M keys. Source: ours


def run_worker(
    stages: Sequence[str], nats: Sequence[str], engine: str, worker_id: str | None, options: Mapping[str, str]
) -> int:
    """Run a worker until SIGTERM; 0 after a clean drain.

    Raises: ConfigError when the stages make no sense together or the surroundings lack something.
    """
    topology = Topology.load()
    names = check_stages(stages, topology)
    settings = EngineOptions.parse(options)
    worker = worker_id or f"{names[0]}-{secrets.token_hex(3)}"
    try:
        topology.subject("ping", worker=worker)
    except TopologyError as error:
        raise ConfigError(f"--id {worker!r} cannot be part of a subject: letters, digits, _ and - only") from error
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(names, nats, engine, worker, settings, topology))
    except SetupError as error:
        # not worth another try by a supervisor: somebody must change the surroundings
        raise ConfigError(str(error)) from error
    return 0


def check_stages(stages: Sequence[str], topology: Topology) -> list[str]:
    """The stages to run, companions included (codec brings parse, decode brings transfer).

    Raises: ConfigError for unknown stages, or two engines in one process.
    """
    names: list[str] = []
    for name in stages:
        if name not in topology.stages:
            raise ConfigError(f"no stage {name!r}; topics.yaml has {', '.join(topology.stages)}")
        names += [n for n in (name, *topology.stages[name].companions) if n not in names]
    if not names:
        raise ConfigError("name at least one stage")
    if all(engine in names for engine in ENGINE_STAGES):
        raise ConfigError("prefill and decode are separate processes: KV moves between them by the handoff")
    return names


async def _serve(
    names: list[str], nats: Sequence[str], engine: str, worker_id: str, options: EngineOptions, topology: Topology
) -> None:
    parts = await asyncio.to_thread(_load, names, engine, options, topology)
    # what is loaded stays: the collector need not walk 129 k vocabulary entries with every generation (15 ms)
    gc.collect()
    gc.freeze()
    # requests are thousands of objects that die young and without cycles: look seldom (a full pass took 0.2 s)
    gc.set_threshold(50_000, 20, 100)
    worker = await Worker.join(nats, worker_id, names, topology)
    for name in names:
        add = _ADD.get(name)
        if add is not None:
            add(worker, parts, options)
    heart = asyncio.get_running_loop().create_task(beat())
    log.info("serving", worker=worker_id, stages=names, engine=engine)
    await worker.run()
    heart.cancel()


def _load(names: list[str], engine: str, options: EngineOptions, topology: Topology) -> dict[str, Any]:
    """What takes long, before the worker announces itself: stage classes, vocabulary, weights."""
    from tidemill import engines  # noqa: PLC0415 - a lookup worker loads no numpy-heavy engine

    parts: dict[str, Any] = {name: _stage_class(topology.stages[name].code) for name in names}
    if "codec" in names:
        from codec.codec import Codec  # noqa: PLC0415

        parts["chat"] = Codec.load(SERVED_MODELS)
    for role in ENGINE_STAGES:
        if role in names:
            parts["engine"] = engines.build(engine, options, shared=role == "prefill")
    return parts


def _stage_class(code: str) -> type:
    module, name = code.split(":")
    stage: type = getattr(importlib.import_module(module), name)
    return stage


def _add_codec(worker: Worker, parts: dict[str, Any], options: EngineOptions) -> None:
    from pipeline.ownership import Ownership  # noqa: PLC0415

    stage = parts["codec"](parts["chat"], worker.membership, options.kv_secret.encode())
    worker.add(Ownership(worker.bus, worker.membership, stage, worker.epoch).run)


def _add_lookup(worker: Worker, parts: dict[str, Any], _options: EngineOptions) -> None:
    from kv.index import PrefixIndex  # noqa: PLC0415
    from pipeline.hop import LookupHop  # noqa: PLC0415
    from stages.lookup import IndexFeed  # noqa: PLC0415

    index = PrefixIndex(INDEX_BYTES)
    IndexFeed(worker.bus, worker.membership, index)
    worker.add(LookupHop(worker.bus, parts["lookup"](worker.membership, index), worker.epoch).run)


def _add_prefill(worker: Worker, parts: dict[str, Any], options: EngineOptions) -> None:
    from pipeline.engine_host import EngineHost  # noqa: PLC0415
    from pipeline.wire import decode_matched  # noqa: PLC0415
    from tidemill import engines  # noqa: PLC0415

    built = parts["engine"]
    host = EngineHost(worker.bus, worker.membership, worker.epoch)
    engine = engines.prefill_engine(built, options)
    stage = parts["prefill"](
        host=host, card=built.runner.card, memory=built.memory, engine=engine, constraints=built.constraints
    )
    stage.start()
    host.serve(stage, "matched", decode_matched)
    worker.load = stage.load

    async def run(stop: asyncio.Event) -> None:
        await host.run(stop)
        stage.close()

    worker.add(run)


def _add_decode(worker: Worker, parts: dict[str, Any], options: EngineOptions) -> None:
    from kv.links import Links, ShmLink  # noqa: PLC0415
    from pipeline.engine_host import EngineHost  # noqa: PLC0415
    from pipeline.wire import decode_offer  # noqa: PLC0415
    from tidemill import engines  # noqa: PLC0415

    built = parts["engine"]
    host = EngineHost(worker.bus, worker.membership, worker.epoch)
    engine = engines.decode_engine(built, options)
    decode = parts["decode"](
        host=host, card=built.runner.card, memory=built.memory, engine=engine, max_running=built.memory.num_states
    )
    links = Links({"shm": ShmLink()})
    transfer = parts["transfer"](
        host=host,
        memory=built.memory,
        decode=decode,
        links=links,
        constraints=built.constraints,
        verify=options.verify,
    )
    decode.start()
    transfer.start()
    host.serve(transfer, "offer", decode_offer)
    worker.load = transfer.load

    async def run(stop: asyncio.Event) -> None:
        await host.run(stop)
        decode.close()
        links.close()

    worker.add(run)


# parse and transfer are companions: codec's owner runs parse, decode's host runs transfer
_ADD = {"codec": _add_codec, "lookup": _add_lookup, "prefill": _add_prefill, "decode": _add_decode}
