"""Every Triton kernel on a GPU: how far from its reference, and how fast beside what the machine can do.

    python -m bench.kernels [--json]

Speed is the median of some launches on sizes of the released model, as bytes that must move per second beside a
measured copy, or as operations per second beside a measured bf16 product of 8192 x 8192 matrices. The difference is
the largest of any element from the reference, which a CPU computes from the same small inputs; for outputs of whole
numbers, codes among them, it is the share of elements that differ. Exit code 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.gather_blocks import gather_blocks, scatter_blocks
from kernels.index_scores import index_scores
from kernels.moe_gate import moe_gate
from kernels.norm_rope_store import store_index, store_main, store_window
from kernels.packed_attention import Chosen, Window, packed_attention
from kernels.quant_fp4 import fake_index, pack_index, pack_main, unpack_index, unpack_main
from kernels.quant_fp8 import fake_q8, pack_q8, unpack_q8
from kernels.rope import rope_frequencies, rope_table
from kernels.sample import sample_rows
from kernels.sparse_attention import sparse_attention
from kernels.top_entries import top_entries

# Source of all sizes: facts-model 1 and 7.1
DIM, INDEX_DIM, HEADS, INDEX_HEADS, WINDOW, TOP, RING = 512, 128, 64, 32, 128, 512, 140
EXPERTS, VOCABULARY, BLOCK_BYTES, ENTRIES = 384, 129_280, 114_048, 128
WARM_UPS, LAUNCHES = 3, 20
GPU_GONE = 2  # exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One call on some device. run: gives its outputs; num_bytes: that must move; num_ops: multiplications and sums."""

    run: Callable[[], Any]
    num_bytes: int
    num_ops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel at any number of rows. make(rows, place): its work there; small: rows to compare, large: to time."""

    make: Callable[[int, Place], Work]
    small: int
    large: int


class Place:
    """Makes the same random tensors for every device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._random = torch.Generator().manual_seed(7)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal fp32."""
        return torch.randn(*shape, generator=self._random).to(self.device)

    def whole(self, top: int, *shape: int) -> Tensor:
        """Whole numbers below top, int64."""
        return torch.randint(0, top, shape, generator=self._random).to(self.device)

    def order(self, n: int) -> Tensor:
        """The numbers below n, each once."""
        return torch.randperm(n, generator=self._random).to(self.device)

    def packed(self, *shape: int) -> Tensor:
        """Bytes to be written."""
        return torch.zeros(*shape, dtype=torch.uint8, device=self.device)


def _sizes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _unary(function: Callable[..., Any], *given: Tensor) -> Work:
    """Of a function that reads each input once and writes each output once."""
    out = function(*given)
    written = (out,) if isinstance(out, Tensor) else out
    return Work(run=lambda: function(*given), num_bytes=_sizes(*given, *written))


def _writes(store: Callable[..., Any], *given: Any, into: list[Tensor], num_bytes: int) -> Work:
    """Of a function that writes into tensors, whatever else it returns."""

    def run() -> Any:
        out = store(*given)
        return [out, *into] if isinstance(out, Tensor) else into

    return Work(run=run, num_bytes=num_bytes)


def _row(rows: int, width: int, place: Place) -> tuple[Tensor, Tensor, float, Tensor]:
    """What a fused store takes first: projections, weight, epsilon, table."""
    table = rope_table(rope_frequencies(64, 1e4), rows).to(place.device)
    return place.normal(rows, width), place.normal(width), 1e-20, table


def _window(rows: int, place: Place) -> Work:
    given, slots = _row(rows, DIM, place), place.order(rows)
    ring = place.packed(-(-rows // RING), RING, DIM * 33 // 32)
    at = slots // RING, slots % RING
    return _writes(store_window, *given, ring, *at, into=[ring], num_bytes=rows * (8 * DIM + 528))


def _main(rows: int, place: Place) -> Work:
    given, slots = _row(rows, DIM, place), place.order(rows)
    main = place.packed(-(-rows // ENTRIES), ENTRIES, DIM * 9 // 16)
    at = slots // ENTRIES, slots % ENTRIES
    return _writes(store_main, *given, main, *at, into=[main], num_bytes=rows * (8 * DIM + 288))


def _index(rows: int, place: Place) -> Work:
    given, slots, blocks = _row(rows, INDEX_DIM, place), place.order(rows), -(-rows // ENTRIES)
    stored = [place.packed(blocks, ENTRIES, INDEX_DIM // 2), place.packed(blocks, ENTRIES, INDEX_DIM // 32)]
    at = slots // ENTRIES, slots % ENTRIES
    return _writes(store_index, *given, *stored, *at, into=stored, num_bytes=rows * (4 * INDEX_DIM + 68))


def _gather(rows: int, place: Place) -> Work:
    pool, blocks = place.whole(256, 2 * rows, BLOCK_BYTES).to(torch.uint8), place.order(2 * rows)[:rows]
    return Work(run=lambda: gather_blocks(pool, blocks), num_bytes=2 * rows * BLOCK_BYTES)


def _scatter(rows: int, place: Place) -> Work:
    pool, blocks = place.packed(2 * rows, BLOCK_BYTES), place.order(2 * rows)[:rows]
    moved = place.whole(256, rows, BLOCK_BYTES).to(torch.uint8)
    return _writes(scatter_blocks, pool, blocks, moved, into=[pool], num_bytes=2 * rows * BLOCK_BYTES)


def _attention_ops(rows: int) -> int:
    return 4 * rows * HEADS * (WINDOW + TOP) * DIM


def _attention(rows: int, place: Place) -> Work:
    q, sink = place.normal(rows, HEADS, DIM).bfloat16(), place.normal(HEADS)
    line, chosen = place.normal(rows + WINDOW - 1, DIM), place.normal(rows, TOP, DIM)
    window = line.as_strided((rows, WINDOW, DIM), (DIM, DIM, 1))
    seen = torch.ones(rows, WINDOW, dtype=torch.bool, device=place.device), place.whole(2, rows, TOP) > 0
    given = q if q.is_cuda else q.float(), window, seen[0], sink, chosen, seen[1]
    num_bytes = 3 * _sizes(q) + _sizes(line, chosen)
    return Work(run=lambda: sparse_attention(*given), num_bytes=num_bytes, num_ops=_attention_ops(rows))


def _packed_attention(rows: int, place: Place) -> Work:
    q, sink = place.normal(rows, HEADS, DIM).bfloat16(), place.normal(HEADS)
    states, blocks = place.order(rows), 64
    ring = pack_q8(place.normal(rows, RING, DIM))[0]
    first = torch.zeros_like(states)
    window = Window(ring=ring, states=states, positions=place.whole(8192, rows) + RING, first=first, size=WINDOW)
    main = pack_main(place.normal(blocks, ENTRIES, DIM))
    index = place.whole(blocks * ENTRIES, rows, TOP)
    chosen = Chosen(main=main, index=index, tables=place.order(blocks).expand(rows, -1))
    query = q if q.is_cuda else q.float()
    num_bytes = 3 * _sizes(q) + rows * (WINDOW * 528 + TOP * 288)
    return Work(
        run=lambda: packed_attention(query, window, sink, chosen), num_bytes=num_bytes, num_ops=_attention_ops(rows)
    )


def _scores(entries: int, place: Place, queries: int) -> Work:
    q, weights = fake_index(place.normal(queries, INDEX_HEADS, INDEX_DIM)), place.normal(queries, INDEX_HEADS)
    k = fake_index(place.normal(entries, INDEX_DIM))
    num_ops = 2 * queries * INDEX_HEADS * INDEX_DIM * entries
    return Work(
        run=lambda: index_scores(q, weights, k), num_bytes=_sizes(q, k) + 4 * queries * entries, num_ops=num_ops
    )


def _top(rows: int, place: Place) -> Work:
    scores, visible = place.normal(rows, 65_536), torch.full((rows,), 65_536, device=place.device)
    return Work(run=lambda: top_entries(scores, visible, TOP), num_bytes=_sizes(scores) + 8 * rows * TOP)


def _gate(rows: int, place: Place) -> Work:
    a, bias = place.normal(rows, EXPERTS), place.normal(EXPERTS) * 0.1
    return Work(run=lambda: moe_gate(a, bias, 6, 1.5), num_bytes=_sizes(a) + 12 * rows * 6)


def _sample(rows: int, place: Place) -> Work:
    logits, one = place.normal(rows, VOCABULARY) * 3, torch.ones(rows, device=place.device)
    numbers = torch.arange(rows, device=place.device)
    given = one, one * 0.95, torch.zeros_like(numbers), numbers * 77, numbers
    return Work(run=lambda: sample_rows(logits, *given), num_bytes=_sizes(logits))


CASES = {
    "fake_q8": Case(make=lambda n, at: _unary(fake_q8, at.normal(n, DIM)), small=99, large=1 << 18),
    "pack_q8": Case(make=lambda n, at: _unary(pack_q8, at.normal(n, DIM)), small=99, large=1 << 18),
    "unpack_q8": Case(make=lambda n, at: _unary(unpack_q8, pack_q8(at.normal(n, DIM))[0]), small=99, large=1 << 18),
    "pack_main": Case(make=lambda n, at: _unary(pack_main, at.normal(n, DIM)), small=99, large=1 << 18),
    "unpack_main": Case(make=lambda n, at: _unary(unpack_main, pack_main(at.normal(n, DIM))), small=99, large=1 << 18),
    "pack_index": Case(make=lambda n, at: _unary(pack_index, at.normal(n, INDEX_DIM)), small=99, large=1 << 20),
    "unpack_index": Case(
        make=lambda n, at: _unary(unpack_index, *pack_index(at.normal(n, INDEX_DIM))), small=99, large=1 << 20
    ),
    "store_window": Case(make=_window, small=99, large=1 << 18),
    "store_main": Case(make=_main, small=99, large=1 << 18),
    "store_index": Case(make=_index, small=99, large=1 << 20),
    "gather_blocks": Case(make=_gather, small=3, large=2048),
    "scatter_blocks": Case(make=_scatter, small=3, large=2048),
    "sparse_attention": Case(make=_attention, small=3, large=512),
    "packed_attention": Case(make=_packed_attention, small=3, large=512),
    "index_scores_decode": Case(make=lambda n, at: _scores(n, at, 1), small=300, large=1 << 20),
    "index_scores_prefill": Case(make=lambda n, at: _scores(n, at, 64), small=300, large=1 << 17),
    "top_entries": Case(make=_top, small=2, large=128),
    "moe_gate": Case(make=_gate, small=99, large=1 << 16),
    "sample_rows": Case(make=_sample, small=3, large=128),
}


def difference(found: Any, wanted: Any) -> float:
    """The largest difference of any output, see the module's docstring. NaN where only one has it counts as one."""
    if not isinstance(found, Tensor):
        return max(difference(a, b) for a, b in zip(found, wanted, strict=True))
    found = found.cpu()
    if not found.is_floating_point():
        return float((found != wanted).double().mean())
    return float((found - wanted).abs().nan_to_num(float("inf")).max())


def seconds(run: Callable[[], Any]) -> float:
    """The median time of one call on the GPU."""
    for _ in range(WARM_UPS):
        run()
    times: list[float] = []
    for _ in range(LAUNCHES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def machine() -> dict[str, float]:
    """What a copy and a product reach here."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target, a = torch.empty_like(source), torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return {
        "copy_gb_per_s": 2 * len(source) / seconds(lambda: target.copy_(source)) / 1e9,
        "gemm_tflop_per_s": 2 * 8192**3 / seconds(lambda: a @ a) / 1e12,
    }


def measure(case: Case, limits: dict[str, float]) -> dict[str, float]:
    """One kernel's figures."""
    found, wanted = case.make(case.small, Place("cuda")).run(), case.make(case.small, Place("cpu")).run()
    work = case.make(case.large, Place("cuda"))
    took = seconds(work.run)
    speed = work.num_bytes / took / 1e9
    figures = {"difference": difference(found, wanted), "ms": took * 1e3}
    figures |= {"gb_per_s": speed, "of_copy": speed / limits["copy_gb_per_s"]}
    if work.num_ops:
        rate = work.num_ops / took / 1e12
        figures |= {"tflop_per_s": rate, "of_gemm": rate / limits["gemm_tflop_per_s"]}
    return figures


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.kernels: no GPU was found; the kernels' tests run without one", file=sys.stderr)
        return GPU_GONE
    limits = machine()
    figures = {name: measure(case, limits) for name, case in CASES.items()}
    if options.json:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), **limits, "kernels": figures}))
        return 0
    print(torch.cuda.get_device_name(), *(f"{name} {value:.0f}" for name, value in limits.items()))
    for name, values in figures.items():
        print(f"{name:22}", *(f"{key} {value:.3g}" for key, value in values.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
