from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
import kernels.sample as sample_file
import kernels.top_entries as top_file
from kernels.launch import Kernel, MissingTritonError, Pointer, Scalar, constexpr, dot_in_bf16, kernel, tiles, tl

ROOT = Path(__file__).parents[2]
MODULES = [f"kernels.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]


@kernel
def _double(x: Pointer, out: Pointer, n: Scalar, block: constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


class OnGPU(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).as_subclass(OnGPU)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)


def test_a_kernel_runs_under_the_interpreter_and_stays_within_its_array():
    x, out = torch.arange(10.0), torch.full((16,), float("nan"))
    _double[(tiles(10, 4),)](x, out, 10, block=4)
    assert torch.equal(out[:10], x * 2)
    assert out[10:].isnan().all()
    _double[(tiles(0, 4),)](x, out, 0, block=4)


def test_what_stands_for_a_kernel_cannot_be_called_outside_one():
    with pytest.raises(TypeError, match="run runs inside a kernel"):
        Kernel(run)(torch.zeros(1))


def test_every_module_is_imported_without_triton():
    """Also what the rest of the project imports: nothing may load Triton before a kernel is launched."""
    names = [*MODULES, "stages.engine.torch.runner", "stages.codec", "kv.transfer", "tidemill.worker"]
    found = run(f"import {', '.join(names)}, sys; sys.exit('triton' in sys.modules)")
    assert found.returncode == 0, found.stderr


def test_a_machine_without_triton_imports_all_and_says_what_a_launch_needs():
    hide = "import sys; sys.modules['triton'] = None; "
    code = f"{hide}import {', '.join(MODULES)}, torch; kernels.quant_fp8.fake_q8_triton(torch.zeros(1, 32))"
    found = run(code)
    assert MissingTritonError.__name__ in found.stderr.splitlines()[-1]
    assert "tidemill[gpu]" in found.stderr
    assert run(f"{hide}import kernels.quant_fp8, torch; kernels.quant_fp8.fake_q8(torch.zeros(1, 32))").returncode == 0


def test_products_in_bf16_are_not_left_to_the_interpreter():
    assert not dot_in_bf16(torch.zeros(1, dtype=torch.bfloat16))


def test_a_launch_puts_tritons_own_objects_in_place_of_the_stand_ins():
    _double[(1,)](torch.zeros(4), torch.zeros(4), 4, block=4)
    assert tl.__name__ == "triton.language"
    assert not isinstance(_double, Kernel)


@pytest.mark.parametrize(
    ("module", "name", "more"),
    [
        ("quant_fp8", "fake_q8", ()),
        ("quant_fp8", "pack_q8", ()),
        ("quant_fp8", "unpack_q8", ()),
        ("quant_fp4", "pack_index", ()),
        ("quant_fp4", "unpack_index", (None,)),
        ("quant_fp4", "pack_main", ()),
        ("quant_fp4", "unpack_main", ()),
        ("norm_rope_store", "store_window", (None,) * 6),
        ("norm_rope_store", "store_main", (None,) * 6),
        ("norm_rope_store", "store_index", (None,) * 7),
        ("gather_blocks", "gather_blocks", (None,)),
        ("gather_blocks", "scatter_blocks", (None, None)),
        ("sparse_attention", "sparse_attention", (None,) * 3),
        ("packed_attention", "packed_attention", (None, None)),
        ("index_scores", "index_scores", (None, None)),
        ("top_entries", "top_entries", (None, 8)),
        ("moe_gate", "moe_gate", (None, 6, 1.5)),
        ("sample", "sample_rows", (None,) * 5),
    ],
)
def test_tensors_on_a_gpu_go_to_the_kernel(monkeypatch, module, name, more):
    file, seen = importlib.import_module(f"kernels.{module}"), []
    monkeypatch.setattr(file, f"{name}_triton", lambda *given: seen.append(given))
    x = on_gpu(2, 64)
    getattr(file, name)(x, *more)
    assert len(seen) == 1
    assert seen[0][0] is x
    assert seen[0][1 : 1 + len(more)] == more


def test_one_row_and_a_candidate_pool_on_a_gpu_go_to_the_same_kernels(monkeypatch):
    monkeypatch.setattr(sample_file, "sample_rows_triton", lambda *given: torch.tensor([len(given)]))
    assert sample_file.sample(on_gpu(9), temperature=1.0, top_p=0.9, top_k=5, u=0.25) == 5
    choice = torch.tensor([[True, False, True]])
    monkeypatch.setattr(top_file, "chosen_triton", lambda best, blocks: choice)
    mask = top_file.candidate_mask(on_gpu(1, 12), torch.tensor([12]), 2, 4)
    assert mask is not None
    assert mask.tolist() == choice.repeat_interleave(4, 1).tolist()


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu():
    """Triton's own compiler and ptxas, for compute capability 9.0, without a GPU: types, shapes, shared memory."""
    command = [sys.executable, "-m", "tests.kernels.compile_all"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == launched_kernels()


def launched_kernels() -> list[str]:
    """Names of all kernels that some launcher starts, from the sources."""
    sources = [path.read_text() for path in (ROOT / "kernels").glob("*.py") if path.name != "launch.py"]
    return sorted({name for source in sources for name in re.findall(r"^    (_\w+)\[", source, re.MULTILINE)})
