"""Compile every kernel for a GPU of compute capability 9.0, where there is none, and print their names.

    python -m tests.kernels.compile_all

Each launcher is called with tensors of the released model's widths; launches compile and do not run.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from kernels.gather_blocks import gather_blocks_triton, scatter_blocks_triton
from kernels.index_scores import index_scores_triton
from kernels.moe_gate import moe_gate_triton
from kernels.norm_rope_store import store_index_triton, store_main_triton, store_window_triton
from kernels.packed_attention import Chosen, Window, packed_attention_triton
from kernels.quant_fp4 import pack_index_triton, pack_main_triton, unpack_index_triton, unpack_main_triton
from kernels.quant_fp8 import fake_q8_triton, pack_q8_triton, unpack_q8_triton
from kernels.sample import sample_rows_triton
from kernels.sparse_attention import sparse_attention_triton
from kernels.top_entries import chosen_triton, top_entries_triton

SHARED_BYTES = 227 * 1024  # that a block may have on compute capability 9.0. Source: CUDA programming guide
_launch = JITFunction.run
_names: set[str] = set()


class Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


def only_compile(self: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """In place of a launch."""
    compiled = _launch(self, *values, grid=grid, warmup=True, **options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_BYTES, f"{self.fn.__name__}: {compiled.metadata.shared} bytes"
    _names.add(self.fn.__name__)
    return compiled


def count(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def packed(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def formats() -> None:
    x = torch.zeros(3, 512)
    fake_q8_triton(x)
    unpack_q8_triton(pack_q8_triton(x)[0])
    unpack_main_triton(pack_main_triton(x))
    unpack_index_triton(*pack_index_triton(x))


def storing() -> None:
    x, weight, rope, at = torch.zeros(3, 512), torch.zeros(512), torch.zeros(3, 128), count(3)
    store_window_triton(x, weight, 1e-20, rope, packed(3, 140, 528), at, at)
    store_main_triton(x, weight, 1e-20, rope, packed(3, 128, 288), at, at)
    store_index_triton(x[:, :128], weight, 1e-20, rope, packed(3, 128, 64), packed(3, 128, 4), at, at)
    pool = packed(3, 114_048)
    scatter_blocks_triton(pool, at, gather_blocks_triton(pool, at))


def attention() -> None:
    q, sink, at = torch.zeros(3, 64, 512, dtype=torch.bfloat16), torch.zeros(64), count(3)
    keys, seen = torch.zeros(3, 128, 512), torch.ones(3, 128, dtype=torch.bool)
    sparse_attention_triton(q, keys, seen, sink, keys, seen)
    window = Window(ring=packed(3, 140, 528), states=at, positions=at, first=at, size=128)
    packed_attention_triton(q, window, sink, Chosen(main=packed(3, 128, 288), index=count(3, 512), tables=count(3, 9)))


def choosing() -> None:
    index_scores_triton(torch.zeros(3, 32, 128), torch.zeros(3, 32), torch.zeros(900, 128))
    top_entries_triton(torch.zeros(3, 900), count(3), 512)
    chosen_triton(torch.zeros(3, 900), 512)
    moe_gate_triton(torch.zeros(3, 384), torch.zeros(384), 6, 1.5)
    logits, one = torch.zeros(3, 129_280), torch.zeros(3)
    sample_rows_triton(logits, one, one, count(3), count(3), count(3))
    sample_rows_triton(logits, one, one, count(3), one.double())


if __name__ == "__main__":
    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = only_compile
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for part in (formats, storing, attention, choosing):
            part()
    print(*sorted(_names), sep="\n")  # noqa: T201  what it was run for
