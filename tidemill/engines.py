"""Builds the engine that a worker runs: memory, runner and scheduler of the stub or the torch engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stages.constraints import Constraints
from stages.engine.decode_engine import DecodeEngine
from stages.engine.interface import Runner, Sequence
from stages.engine.memory import EngineMemory
from stages.engine.prefill_engine import PrefillEngine
from tidemill.engine_options import EngineOptions
from tidemill.state import cache_dir

# Sizes of an engine worker on a laptop. Source: ours.
# stub: 2 KiB a block, 8 GiB of prompt tokens are not needed: 64 Ki blocks = 8 M tokens = 128 MiB
STUB_BLOCKS, STUB_STATES = 65_536, 4_096
# torch, demo checkpoint: ~10 KB a block and ~75 KB a state: 1,024 blocks = 131 k tokens
TORCH_BLOCKS, TORCH_STATES, TORCH_BATCH = 1_024, 64, 16
# The interpreter lets another thread in after this long; the loop must answer offers within 25 ms while the engine
# thread computes. Source: ours (default is 5 ms, a handful of switches then eat the accept timeout).
SWITCH_INTERVAL_S = 0.001


@dataclass(frozen=True, slots=True)
class Built:
    """A runner and the memory it computes in."""

    runner: Runner
    memory: EngineMemory
    inline: bool
    max_batch: int
    constraints: Constraints | None = None
    chaos: Callable[[Sequence], None] | None = None


def build(engine: str, options: EngineOptions, *, shared: bool) -> Built:
    """Blocks while weights load (or are made, on first use). shared: peers read this memory (prefill)."""
    return _stub(options, shared=shared) if engine == "stub" else _torch(options, shared=shared)


def prefill_engine(built: Built, options: EngineOptions) -> PrefillEngine:
    """The scheduler of a prefill worker."""
    return PrefillEngine(
        built.runner,
        built.memory.kv,
        inline=built.inline,
        tokens_per_s=options.stub_prefill_tokens_per_s,
        chaos=built.chaos,
    )


def decode_engine(built: Built, options: EngineOptions) -> DecodeEngine:
    """The scheduler of a decode worker."""
    pace_s = options.stub_step_s if built.inline else 0.0
    return DecodeEngine(built.runner, built.memory, max_batch=built.max_batch, inline=built.inline, pace_s=pace_s)


def _stub(options: EngineOptions, *, shared: bool) -> Built:
    from stages.engine.stub import LAYOUT, StubOptions, StubRunner  # noqa: PLC0415 - only what this worker runs

    states = options.states or STUB_STATES
    memory = EngineMemory(LAYOUT, options.kv_blocks or STUB_BLOCKS, states, shared=shared)
    stub = StubOptions(max_context_tokens=options.stub_max_context_tokens, flip_blocks=options.stub_flip_blocks)
    runner = StubRunner(memory.kv, stub)
    return Built(runner, memory, True, states, chaos=runner.flip if options.stub_flip_blocks else None)


def _torch(options: EngineOptions, *, shared: bool) -> Built:
    import torch  # noqa: PLC0415 - a stub worker never loads it

    from kernels.row_linear import exact  # noqa: PLC0415
    from stages.engine.torch.checkpoint import read_checkpoint  # noqa: PLC0415
    from stages.engine.torch.runner import TorchRunner, model_card  # noqa: PLC0415

    torch.set_num_threads(options.threads)
    exact(options.exact)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    checkpoint = read_checkpoint(options.model_dir or demo_checkpoint())
    states = options.states or TORCH_STATES
    memory = EngineMemory(model_card(checkpoint).layout, options.kv_blocks or TORCH_BLOCKS, states, shared=shared)
    runner = TorchRunner(checkpoint, memory.kv)
    return Built(runner, memory, False, TORCH_BATCH, _constraints(runner.card.vocab_size))


def _constraints(vocab_size: int) -> Constraints:
    """Ready to compile: reading the vocabulary holds the interpreter for half a second, so it comes before serving."""
    from codec.vocab import OutputVocab, load_vocabulary  # noqa: PLC0415
    from stages.engine.constraint import ConstraintCompiler, EngineConstraints, GrammarBuilder  # noqa: PLC0415

    compiler = ConstraintCompiler(lambda: GrammarBuilder(OutputVocab(load_vocabulary()), vocab_size))
    compiler.preload().result()
    return EngineConstraints(compiler)


def demo_checkpoint() -> Path:
    """The deterministic random checkpoint that `up` and `demo` run; made in the user's cache on first use."""
    from stages.engine.torch import random_checkpoint  # noqa: PLC0415

    return random_checkpoint.demo_checkpoint(cache_dir() / "models")
