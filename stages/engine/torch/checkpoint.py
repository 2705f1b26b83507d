"""Reading checkpoint directories in the official tensor names and number formats.

Source: facts-model 7 (formats) and 11 (names, the optional `model.` prefix).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.quant_fp4 import unpack_nibbles
from kernels.quant_fp8 import exponent_value
from stages.engine.torch.config import TorchConfig
from stages.engine.torch.tensor_specs import BLOCK, Format, expected
from stages.engine.torch.token_map import derive_token_map

MAP_FILE = "engram_token_map.npy"  # ours: token id -> compressed id, beside checkpoints without a tokenizer
INDEX_FILE = "model.safetensors.index.json"  # of a checkpoint in several files
SKIPPED = ("mtp.", "vision.", "aligner.", "image_")  # draft layers and vision are not run by this engine


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor -> file


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be used; the message names the tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checked checkpoint in memory, as stored; `weight` de-quantises. fingerprint: 32 hex digits.

    tensors: by official name without the optional `model.` prefix; token_map: [vocab_size] int64 or None.
    """

    name: str
    config: TorchConfig
    tensors: Mapping[str, Tensor]
    token_map: npt.NDArray[np.int64] | None
    fingerprint: str

    def weight(self, name: str, form: Format) -> Tensor:
        """One weight de-quantised to fp32, a new contiguous tensor."""
        match form:
            case Format.BF16 | Format.FP32:
                return self.tensors[name].float().contiguous()
            case Format.FP8 | Format.FP8_ROWS:
                return dequantise_fp8(self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"])
            case Format.MXFP4:
                return dequantise_mxfp4(self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"])


def dequantise_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [o, i] times its scale block: fp32 [o, i]. A scale row per row or per 32 rows."""
    spread = exponent_value(scale.view(torch.uint8)).repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    if scale.shape[0] != codes.shape[0]:
        spread = spread.repeat_interleave(BLOCK, 0)[: codes.shape[0]]
    return codes.float() * spread


def dequantise_mxfp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Packed e2m1 [o, i/2] times its scale: fp32 [o, i]."""
    values = unpack_nibbles(codes.view(torch.uint8))
    return values * exponent_value(scale.view(torch.uint8)).repeat_interleave(BLOCK, 1)


def read_checkpoint(path: Path) -> Checkpoint:
    """Load and check a checkpoint directory: config.json, *.safetensors and the token map or the tokenizer.

    Raises:
        ConfigError: config.json is not one this engine runs.
        CheckpointError: tensors are missing, unknown, or of another type or shape (each is named), a file is
            damaged, or the Engram token map is missing or does not fit.
    """
    config = TorchConfig.read(path / "config.json")
    tensors = dict(_read_tensors(path))
    _check_tensors(config, tensors)
    token_map = _read_token_map(path, config)
    raw = (path / "config.json").read_bytes()
    return Checkpoint(
        name=path.name,
        config=config,
        tensors=tensors,
        token_map=token_map,
        fingerprint=_fingerprint(raw, tensors, token_map),
    )


def _files(path: Path) -> list[Path]:
    """The files that hold the tensors: those that the index names, or all there are. Raises: CheckpointError."""
    if not (path / INDEX_FILE).exists():
        if found := sorted(path.glob("*.safetensors")):
            return found
        raise CheckpointError(f"{path}: no *.safetensors file")
    try:
        names = set(msgspec.json.decode((path / INDEX_FILE).read_bytes(), type=_Index).weight_map.values())
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path / INDEX_FILE}: {error}") from error
    if outside := {name for name in names if Path(name).name != name}:
        raise CheckpointError(f"{path / INDEX_FILE} names files elsewhere: {_list(outside)}")
    if missing := {name for name in names if not (path / name).exists()}:
        raise CheckpointError(f"{path}: of the {len(names)} files in {INDEX_FILE} are missing: {_list(missing)}")
    return [path / name for name in sorted(names)]


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all files; they stay mapped, so that nothing is read before it is used."""
    for file in _files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  safe_open has no __iter__
                    if not (short := name.removeprefix("model.")).startswith(SKIPPED):
                        yield short, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: {error}") from error


def _check_tensors(config: TorchConfig, tensors: Mapping[str, Tensor]) -> None:
    want = {name: (dtype, shape) for spec in expected(config) for name, dtype, shape in spec.parts()}
    faults = [f"missing: {_list(want.keys() - tensors.keys())}"] if want.keys() - tensors.keys() else []
    if unknown := tensors.keys() - want.keys():
        faults.append(f"unknown: {_list(unknown)}")
    for name in sorted(want.keys() & tensors.keys()):
        dtype, shape = want[name]
        found = tensors[name]
        if found.dtype != dtype or tuple(found.shape) != shape:
            faults.append(f"{name} is {found.dtype} {list(found.shape)}, not {dtype} {list(shape)}")
    if faults:
        raise CheckpointError("; ".join(faults))


def _list(names: Iterable[str], most: int = 8) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def _read_token_map(path: Path, config: TorchConfig) -> npt.NDArray[np.int64] | None:
    if config.engram is None:
        return None
    try:
        if (path / MAP_FILE).exists():
            found: npt.NDArray[np.int64] = np.load(path / MAP_FILE).astype(np.int64)
        else:
            found = derive_token_map(path / "tokenizer.json", config.vocab_size)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: no Engram token map: {error}") from error
    size = config.engram.compressed_vocab_size
    if found.shape != (config.vocab_size,) or found.min() < 0 or found.max() >= size:
        raise CheckpointError(f"{path}: the Engram token map does not map {config.vocab_size} ids below {size}")
    return found


def _fingerprint(config: bytes, tensors: Mapping[str, Tensor], token_map: npt.NDArray[np.int64] | None) -> str:
    """A hash over everything that answers depend on; the order of files and tensors does not matter."""
    digest = blake2b(json.dumps(json.loads(config), sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    if token_map is not None:
        digest.update(token_map.tobytes())
    return digest.hexdigest()
