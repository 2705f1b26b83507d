"""Speed of the torch engine: tokens per second of prefill and decode, the price of exactness, steps by context.

    python -m bench.engine [--json] [--quick] [--record] [--mlx-python PATH]

One process, one thread, the embedded demo model (or --checkpoint DIR); no pipeline. Decode runs exact (fixed row
blocks: a token does not depend on its batch) and inexact beside each other, in turns. mlx-vlm decodes the same weights
in the same run where it is installed, or under the interpreter that --mlx-python names.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.hops import machine
from kernels.row_linear import exact
from kv.plan import plan
from stages.engine.interface import BLOCK_TOKENS, KVMemory, SamplingParams, Sequence
from stages.engine.torch.checkpoint import Checkpoint, read_checkpoint
from stages.engine.torch.runner import TorchRunner, model_card
from stages.engine.torch.tensor_specs import Format, expected
from tidemill.engines import demo_checkpoint

RESULTS = Path(__file__).parent / "results" / "engine.csv"
PEER = Path(__file__).parent / "peers" / "mlx_decode.py"
CHUNK_TOKENS = 512
PEER_TIMEOUT_S = 300.0
PEER_BATCHES = (1, 4, 16)  # beyond them its prefill alone takes minutes
_SAMPLING = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, max_tokens=1 << 20, eos_ids=(), ignore_eos=True)

Figures = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to run. seconds: of each decode figure, in slices; prompt: tokens before the first decoded one."""

    batches: tuple[int, ...] = (1, 4, 16, 64)
    prompt: int = 128
    prefill_tokens: int = 4_096
    contexts: tuple[int, ...] = (1_024, 4_096, 16_384)
    seconds: float = 4.0
    slices: int = 4


QUICK = Plan(batches=(1, 4), prompt=64, prefill_tokens=512, contexts=(256, 512), seconds=0.2, slices=1)


class Bench:
    """One runner with room for what a plan needs."""

    def __init__(self, checkpoint: Checkpoint, wanted: Plan) -> None:
        self.card = model_card(checkpoint)
        self.plan = wanted
        layout = self.card.layout
        room = max(*wanted.contexts, wanted.prefill_tokens) + BLOCK_TOKENS * 8
        self.per_sequence = -(-(wanted.prompt + 4_096) // BLOCK_TOKENS)
        num_blocks = max(max(wanted.batches) * self.per_sequence, -(-room // BLOCK_TOKENS))
        memory = KVMemory(
            blocks=np.zeros((num_blocks, layout.block_bytes), np.uint8),
            states=np.zeros((max(wanted.batches), layout.state_bytes), np.uint8),
        )
        self.num_blocks = num_blocks
        self.runner = TorchRunner(checkpoint, memory)

    def sequence(self, n: int, number: int = 0, blocks: range | None = None) -> Sequence:
        """A prompt of n random tokens in its own blocks."""
        ids = np.random.default_rng(number).integers(3, self.card.vocab_size, n).astype(np.uint32)
        table = blocks or range(number * self.per_sequence, (number + 1) * self.per_sequence)
        windows = self.card.replay_windows
        return Sequence(
            rid=f"{number:032x}",
            attempt=0,
            choice=0,
            ids=ids,
            tail_ids=ids[-3:],
            num_prompt_tokens=n,
            plan=plan(n, 0, keep=self.card.keep_tokens, window=self.card.window_tokens, windows=windows),
            block_table=list(table),
            state_slot=number,
            seed=number,
            sampling=_SAMPLING,
        )

    def prefill(self, seq: Sequence) -> float:
        """Compute a prompt, in seconds."""
        begun = time.perf_counter()
        for start in range(0, seq.num_prompt_tokens, CHUNK_TOKENS):
            token = self.runner.prefill(seq, start, min(start + CHUNK_TOKENS, seq.num_prompt_tokens))
            if token is not None:
                seq.output.append(token)
        return time.perf_counter() - begun

    def steps(self, seqs: list[Sequence], seconds: float) -> list[float]:
        """Seconds of each decode step, for so long or as long as the blocks last."""
        times: list[float] = []
        end = time.perf_counter() + seconds
        room = min(len(seq.block_table) for seq in seqs) * BLOCK_TOKENS
        while not times or (time.perf_counter() < end and max(seq.num_tokens for seq in seqs) < room):
            begun = time.perf_counter()
            for seq, token in zip(seqs, self.runner.decode(seqs), strict=True):
                seq.output.append(token)
            times.append(time.perf_counter() - begun)
        return times


def measure(path: Path, wanted: Plan, mlx_python: str, say: Say) -> Figures:
    """All figures; two minutes with the full plan."""
    checkpoint = read_checkpoint(path)
    bench = Bench(checkpoint, wanted)
    say("prefill")
    long = bench.sequence(wanted.prefill_tokens, blocks=range(bench.num_blocks))
    found: Figures = {"prefill_tok_s": wanted.prefill_tokens / min(bench.prefill(long) for _ in range(3))}
    found |= _decode(bench, wanted, say)
    found["step_ms_by_context"] = _by_context(bench, wanted, say)
    say("mlx-vlm")
    found["mlx_decode_tok_s"] = mlx_decode(path, checkpoint, wanted, mlx_python, say)
    return found


def _decode(bench: Bench, wanted: Plan, say: Say) -> Figures:
    """Exact and inexact in turns, on the same sequences."""
    found: Figures = {"decode_tok_s": {}, "decode_tok_s_inexact": {}}
    for batch in wanted.batches:
        say(f"decode, batch {batch}")
        seqs = [bench.sequence(wanted.prompt, number) for number in range(batch)]
        for seq in seqs:
            bench.prefill(seq)
        times: dict[str, list[float]] = {"decode_tok_s": [], "decode_tok_s_inexact": []}
        bench.steps(seqs, 0)
        for _ in range(wanted.slices):
            for name, taken in times.items():
                with _exactness(name == "decode_tok_s"):
                    taken.extend(bench.steps(seqs, wanted.seconds / wanted.slices / 2))
        for name, taken in times.items():
            found[name][str(batch)] = batch / statistics.median(taken)
    return found


@contextmanager
def _exactness(wanted: bool) -> Iterator[None]:
    exact(wanted)
    try:
        yield
    finally:
        exact(True)


def _by_context(bench: Bench, wanted: Plan, say: Say) -> dict[str, float]:
    """Median step at batch 1 by the tokens before it. Indexing looks at every entry, all else at a constant number."""
    found = {}
    for tokens in wanted.contexts:
        say(f"steps after {tokens} tokens")
        seq = bench.sequence(tokens, blocks=range(bench.num_blocks))
        bench.prefill(seq)
        bench.steps([seq], 0)
        found[str(tokens)] = 1e3 * statistics.median(bench.steps([seq], wanted.seconds / 2))
    return found


def mlx_decode(path: Path, checkpoint: Checkpoint, wanted: Plan, python: str, say: Say) -> dict[str, float] | None:
    """Tokens per second of mlx-vlm by batch, None where it is not installed."""
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        directory = Path(folder)
        _write_dense(checkpoint, directory)
        found = json.loads((path / "config.json").read_bytes())
        (directory / "text_config.json").write_text(json.dumps(found.get("text_config", found)))
        job = {
            "batches": [b for b in wanted.batches if b in PEER_BATCHES],
            "prompt": wanted.prompt,
            "seconds": wanted.seconds / 2,
        }
        (directory / "job.json").write_text(json.dumps(job))
        # one thread, as we have
        surroundings = os.environ | {"OMP_NUM_THREADS": "1", "MLX_NUM_THREADS": "1"}
        done = subprocess.run(  # noqa: S603 -- the interpreter that the caller names
            [python, str(PEER), folder],
            check=False,
            capture_output=True,
            text=True,
            env=surroundings,
            timeout=PEER_TIMEOUT_S,
        )
    if done.returncode:
        say(f"mlx-vlm is left out: {done.stderr.strip().splitlines()[-1:]}")
        return None
    speeds: dict[str, float] = json.loads(done.stdout)
    return speeds


def _write_dense(checkpoint: Checkpoint, directory: Path) -> None:
    """The de-quantised weights by official name, as mlx-vlm wants them."""
    plain = (Format.BF16, Format.FP32)
    dense = {
        spec.name + ("" if spec.format in plain else ".weight"): checkpoint.weight(spec.name, spec.format).numpy()
        for spec in expected(checkpoint.config)
    }
    np.savez(directory / "dense.npz", **dense)  # type: ignore[arg-type]
    np.save(directory / "token_map.npy", np.zeros(0) if checkpoint.token_map is None else checkpoint.token_map)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def record(figures: Figures) -> None:
    """Append the figures to bench/results/engine.csv."""
    row = machine() | {"command": "python -m bench.engine"}
    for name, value in figures.items():
        row |= {f"{name}_{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    """Print the figures, one JSON object with --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="a small run that shows whether it works; no real figures")
    parser.add_argument("--record", action="store_true", help="append a row to bench/results/engine.csv")
    parser.add_argument("--checkpoint", type=Path, help="another checkpoint than the embedded demo model")
    parser.add_argument("--mlx-python", default=sys.executable, help="an interpreter that has mlx-vlm")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.checkpoint or demo_checkpoint()
    wanted = QUICK if options.quick else Plan()
    figures = _rounded(
        measure(path, wanted, options.mlx_python, lambda line: print(f"bench.engine: {line}", file=sys.stderr))
    )
    if options.record:
        record(figures)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:24} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
