"""Every tensor of a checkpoint: official name, shape and number format, computed from the config.

| format | on disk | meaning |
|---|---|---|
| FP8 | `X.weight` e4m3 [o, i], `X.scale` e8m0 [o/32 up, i/32 up] | one scale per 32 x 32 block |
| FP8_ROWS | `X.weight` e4m3 [o, i], `X.scale` e8m0 [o, i/32] | one scale per 32 channels of a row |
| MXFP4 | `X.weight` int8 [o, i/2], `X.scale` e8m0 [o, i/32] | e2m1, even channel in the low nibble |
| BF16, FP32 | `X` | as it is |

Source: facts-model 7 and 11 (names, shapes, formats).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

from stages.engine.torch.config import TorchConfig

BLOCK = 32  # rows and channels per weight scale. Source: facts-model 1 (weight_block_size)


class Format(StrEnum):
    """How one weight is stored."""

    FP8 = "fp8"
    FP8_ROWS = "fp8_rows"
    MXFP4 = "mxfp4"
    BF16 = "bf16"
    FP32 = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One weight of the model: its name without the suffix of quantised formats, logical shape, format."""

    name: str
    shape: tuple[int, ...]
    format: Format

    def parts(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(tensor name, dtype, shape) of everything on disk that makes up this weight."""
        match self.format:
            case Format.BF16:
                yield self.name, torch.bfloat16, self.shape
            case Format.FP32:
                yield self.name, torch.float32, self.shape
            case Format.FP8 | Format.FP8_ROWS:
                rows, width = self.shape
                scale_rows = rows if self.format is Format.FP8_ROWS else -(-rows // BLOCK)
                yield f"{self.name}.weight", torch.float8_e4m3fn, self.shape
                yield f"{self.name}.scale", torch.float8_e8m0fnu, (scale_rows, -(-width // BLOCK))
            case Format.MXFP4:
                rows, width = self.shape
                yield f"{self.name}.weight", torch.int8, (rows, width // 2)
                yield f"{self.name}.scale", torch.float8_e8m0fnu, (rows, width // BLOCK)


def expected(c: TorchConfig) -> list[Spec]:
    """Every weight that a checkpoint of this config holds, in a fixed order. Source: facts-model 11."""
    specs = [
        _spec("embed.weight", Format.BF16, c.vocab_size, c.hidden),
        _spec("head.weight", Format.BF16, c.vocab_size, c.hidden),
        _spec("norm.weight", Format.BF16, c.hidden),
    ]
    for layer in range(c.layers):
        prefix = f"layers.{layer}."
        specs += [*_attention(c, layer, prefix + "attn."), *_mixing(c, prefix), *_experts(c, prefix + "ffn.")]
        specs += [_spec(f"{prefix}{name}_norm.weight", Format.BF16, c.hidden) for name in ("attn", "ffn")]
        specs += _engram(c, layer, prefix + "engram.")
    return specs


def _spec(name: str, form: Format, *shape: int) -> Spec:
    return Spec(name=name, shape=shape, format=form)


def _attention(c: TorchConfig, layer: int, p: str) -> Iterator[Spec]:
    width = c.heads * c.head_dim
    yield _spec(p + "wq_a", Format.FP8, c.q_lora, c.hidden)
    yield _spec(p + "q_norm.weight", Format.BF16, c.q_lora)
    yield _spec(p + "wq_b", Format.FP8, width, c.q_lora)
    yield _spec(p + "wkv", Format.FP8, c.head_dim, c.hidden)
    yield _spec(p + "kv_norm.weight", Format.BF16, c.head_dim)
    yield _spec(p + "attn_sink", Format.FP32, c.heads)
    yield _spec(p + "wo_a", Format.FP8, c.o_groups * c.o_lora, width // c.o_groups)
    yield _spec(p + "wo_b", Format.FP8, c.hidden, c.o_groups * c.o_lora)
    if layer in c.kv_sources:
        yield _spec(p + "compressor.wkv.weight", Format.BF16, c.head_dim, c.hidden)
        yield _spec(p + "compressor.norm.weight", Format.BF16, c.head_dim)
        if c.ratios[layer] == 2:
            yield _spec(p + "compressor.wgate.weight", Format.BF16, c.head_dim, c.hidden)
        yield _spec(p + "indexer.wk.weight", Format.BF16, c.index_head_dim, c.head_dim)
        yield _spec(p + "indexer.k_norm.weight", Format.BF16, c.index_head_dim)
    if layer in c.index_sources:
        yield _spec(p + "indexer.wq_b", Format.FP8, c.index_heads * c.index_head_dim, c.q_lora)
        yield _spec(p + "indexer.weights_proj.weight", Format.BF16, c.index_heads, c.hidden)


def _mixing(c: TorchConfig, p: str) -> Iterator[Spec]:
    mixes = (2 + c.streams) * c.streams
    for part in ("attn", "ffn"):
        yield _spec(f"{p}hc_{part}_fn", Format.FP32, mixes, c.streams * c.hidden)
        yield _spec(f"{p}hc_{part}_base", Format.FP32, mixes)
        yield _spec(f"{p}hc_{part}_scale", Format.FP32, 3)


def _experts(c: TorchConfig, p: str) -> Iterator[Spec]:
    yield _spec(p + "gate.weight", Format.BF16, c.experts, c.hidden)
    yield _spec(p + "gate.bias", Format.FP32, c.experts)
    yield _spec(p + "gate.bias_vl", Format.FP32, c.experts)
    owners = [(f"experts.{e}", Format.MXFP4) for e in range(c.experts)] + [("shared_experts", Format.FP8)]
    for owner, form in owners:
        yield _spec(f"{p}{owner}.w1", form, c.moe_inter, c.hidden)
        yield _spec(f"{p}{owner}.w3", form, c.moe_inter, c.hidden)
        yield _spec(f"{p}{owner}.w2", form, c.hidden, c.moe_inter)


def _engram(c: TorchConfig, layer: int, p: str) -> Iterator[Spec]:
    if c.engram is None or layer not in c.engram.layers:
        return
    yield _spec(p + "embed", Format.FP8_ROWS, c.engram.rows[c.engram.layers.index(layer)], c.engram.head_dim)
    yield _spec(p + "wkv", Format.FP8, c.hidden * (c.streams + 1), c.engram.width)
    yield _spec(p + "q_weight", Format.BF16, c.streams, c.hidden)
    yield _spec(p + "k_weight", Format.BF16, c.streams, c.hidden)
