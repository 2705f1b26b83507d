from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.engine.torch.checkpoint import INDEX_FILE, MAP_FILE, CheckpointError, read_checkpoint
from stages.engine.torch.random_checkpoint import TINY, demo_checkpoint, random_checkpoint, tiny_checkpoint
from stages.engine.torch.tensor_specs import Format, Spec, expected
from stages.engine.torch.weight_formats import store
from tests.stages.engine.torch.conftest import GOLDEN


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint that may be damaged."""
    shutil.copytree(GOLDEN, tmp_path / "model")
    return tmp_path / "model"


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_weights_are_the_stored_codes_times_their_scales():
    found = read_checkpoint(GOLDEN)
    raw = found.tensors["layers.0.attn.wq_b.weight"].float()
    scale = found.tensors["layers.0.attn.wq_b.scale"].float()
    weight = found.weight("layers.0.attn.wq_b", Format.FP8)
    assert torch.equal(weight, raw * scale.repeat_interleave(32, 0).repeat_interleave(32, 1))
    expert = found.weight("layers.0.ffn.experts.3.w2", Format.MXFP4)
    codes = found.tensors["layers.0.ffn.experts.3.w2.weight"].view(torch.uint8)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    scales = found.tensors["layers.0.ffn.experts.3.w2.scale"].float()
    assert torch.equal(expert[:, 0::2], grid[(codes & 15).int()] * scales.repeat_interleave(16, 1))
    assert torch.equal(expert[:, 1::2], grid[(codes >> 4).int()] * scales.repeat_interleave(16, 1))


@pytest.mark.parametrize("form", [Format.FP8, Format.FP8_ROWS, Format.MXFP4])
@pytest.mark.parametrize("shape", [(64, 96), (40, 32)])
def test_storing_what_was_read_gives_the_same_values(tmp_path, form, shape):
    found = read_checkpoint(GOLDEN)
    spec = Spec(name="x", shape=shape, format=form)
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(31)) * 0.2
    again = type(found)(
        name="x", config=found.config, tensors=store(spec, weight), token_map=None, fingerprint="00"
    ).weight("x", form)
    assert [(n, t.dtype, tuple(t.shape)) for n, t in store(spec, weight).items()] == list(spec.parts())
    assert (again - weight).abs().max() <= weight.abs().max() / 6
    twice = store(spec, again)
    assert torch.equal(type(found)(
        name="x", config=found.config, tensors=twice, token_map=None, fingerprint="00"
    ).weight("x", form), again)  # fmt: skip


def test_the_optional_prefix_and_the_parts_we_do_not_run_are_accepted(directory):
    def change(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)
        for name in ("mtp.0.attn.wkv.weight", "vision.norm.weight", "model.mtp.1.norm.weight", "aligner.w1.weight"):
            tensors[name] = torch.zeros(3)

    before = read_checkpoint(directory)
    rewrite(directory, change)
    after = read_checkpoint(directory)
    assert after.tensors.keys() == before.tensors.keys()
    assert after.fingerprint == before.fingerprint


def test_a_missing_tensor_is_named(directory):
    rewrite(directory, lambda tensors: tensors.pop("layers.3.attn.wq_a.scale"))
    with pytest.raises(CheckpointError, match=r"missing: layers.3.attn.wq_a.scale"):
        read_checkpoint(directory)


def test_an_unknown_tensor_is_named(directory):
    rewrite(directory, lambda tensors: tensors.update({"layers.3.attn.q_bias": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"unknown: layers.3.attn.q_bias"):
        read_checkpoint(directory)


@pytest.mark.parametrize("other", [torch.zeros(5, dtype=torch.bfloat16), torch.zeros(128)])
def test_a_wrong_shape_or_type_is_named(directory, other):
    rewrite(directory, lambda tensors: tensors.update({"norm.weight": other}))
    with pytest.raises(CheckpointError, match=r"norm.weight is torch.\w+ \[\d+\], not torch.bfloat16 \[128\]"):
        read_checkpoint(directory)


def test_many_faults_come_in_one_message(directory):
    def change(tensors):
        for layer in range(8):
            tensors.pop(f"layers.{layer}.ffn.gate.bias")
            tensors.pop(f"layers.{layer}.ffn.gate.bias_vl")
        tensors["strange"] = torch.zeros(1)

    rewrite(directory, change)
    with pytest.raises(CheckpointError, match=r"missing: .* and 8 more; unknown: strange"):
        read_checkpoint(directory)


def test_a_damaged_or_missing_file_is_refused(directory):
    (directory / "model.safetensors").write_bytes(b"\x10\x00\x00\x00rubbish")
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        read_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        read_checkpoint(directory)


@pytest.mark.parametrize("ids", [np.zeros(3, np.int64), np.full(512, 400), np.full(512, -1)])
def test_a_token_map_that_does_not_fit_is_refused(directory, ids):
    np.save(directory / MAP_FILE, ids)
    with pytest.raises(CheckpointError, match="token map does not map 512 ids below 400"):
        read_checkpoint(directory)


def test_without_a_map_a_tokenizer_is_needed(directory):
    (directory / MAP_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"no Engram token map: .*tokenizer.json does not exist"):
        read_checkpoint(directory)


def test_the_fingerprint_covers_config_weights_and_map(directory):
    prints = {read_checkpoint(directory).fingerprint}
    rewrite(directory, lambda tensors: tensors["layers.7.ffn.gate.bias"].add_(1e-3))
    prints.add(read_checkpoint(directory).fingerprint)
    found = json.loads((directory / "config.json").read_text())
    found["text_config"]["swiglu_limit"] = 9.0
    (directory / "config.json").write_text(json.dumps(found))
    prints.add(read_checkpoint(directory).fingerprint)
    ids = np.load(directory / MAP_FILE)
    np.save(directory / MAP_FILE, ids[::-1])
    prints.add(read_checkpoint(directory).fingerprint)
    assert len(prints) == 4
    assert all(len(p) == 32 for p in prints)


def test_the_random_checkpoint_is_written_once_and_is_the_same_everywhere(tmp_path):
    first = tiny_checkpoint(tmp_path / "a")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny_checkpoint(tmp_path / "a") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert [p.name for p in (tmp_path / "a").iterdir()] == [first.name]  # nothing half-built stays
    second = tiny_checkpoint(tmp_path / "b")
    assert read_checkpoint(first).fingerprint == read_checkpoint(second).fingerprint
    other = random_checkpoint(tmp_path / "c", "tidemill-tiny", TINY, seed=8)
    assert read_checkpoint(other).fingerprint != read_checkpoint(first).fingerprint


def test_the_bytes_of_the_tiny_checkpoint_never_change(tiny):
    """Cached blocks and recorded outputs of other machines depend on it; raise VERSION when this must change."""
    assert tiny.fingerprint == "60f9079dd6b39776f38f514de93c825d"


@pytest.mark.slow
def test_the_demo_checkpoint_has_the_real_vocabulary(tmp_path):
    found = read_checkpoint(demo_checkpoint(tmp_path))
    assert found.config.vocab_size == 129280
    assert found.config.max_positions >= 65536
    assert sum(t.nbytes for t in found.tensors.values()) < 80e6


def test_every_spec_has_distinct_names(tiny):
    names = [name for spec in expected(tiny.config) for name, _, _ in spec.parts()]
    assert len(names) == len(set(names))


def shards(directory: Path, num_files: int) -> dict[str, str]:
    """Split the checkpoint into files with an index; its weight map."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = [f"model-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)]
    where = {tensor: names[index % num_files] for index, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in where if where[tensor] == name}, directory / name)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return where


def test_a_checkpoint_in_several_files_is_the_same_checkpoint(directory: Path):
    whole = read_checkpoint(directory)
    shards(directory, 3)
    assert read_checkpoint(directory).fingerprint == whole.fingerprint


def test_a_file_that_the_index_does_not_name_is_not_read(directory: Path):
    whole = read_checkpoint(directory)
    shards(directory, 3)
    save_file({"something.else": torch.zeros(3)}, directory / "other.safetensors")
    assert read_checkpoint(directory).fingerprint == whole.fingerprint


def test_a_missing_shard_is_named(directory: Path):
    shards(directory, 3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"of the 3 files in .* are missing: model-00002-of-00003\.safetensors"):
        read_checkpoint(directory)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        (b"{", INDEX_FILE),
        (b"[]", INDEX_FILE),
        (b'{"weight_map": {"a": 5}}', "weight_map"),
        (b'{"weight_map": {"a": "../../etc/passwd"}}', "names files elsewhere"),
    ],
)
def test_a_bad_index_is_refused(directory: Path, index: bytes, complaint: str):
    (directory / INDEX_FILE).write_bytes(index)
    with pytest.raises(CheckpointError, match=complaint):
        read_checkpoint(directory)
