"""The weights in the form the model multiplies with: de-quantised once to fp32, what shares an input joined.

Letters: D hidden, H heads, d head_dim, q q_lora, I moe_inter, E experts, n streams.
Source: ours (the joins); facts-model 3 and 4 (what each weight does).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.mhc import MixWeights
from kernels.row_linear import settle
from stages.engine.torch.checkpoint import Checkpoint
from stages.engine.torch.config import TorchConfig
from stages.engine.torch.tensor_specs import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """Full layers only. wkv: [d, D], or [2 d, D] with the gate's rows below for ratio 2; wk: [index_head_dim, d]."""

    wkv: Tensor
    norm: Tensor
    wk: Tensor
    k_norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramWeights:
    """codes, scale: the table as stored, uint8 [rows, head_dim] and [rows, head_dim/32]; wkv: [D (n + 1), width].

    gate: [n, D], the product of both weights.
    """

    codes: Tensor
    scale: Tensor
    wkv: Tensor
    gate: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer.

    down: [q + d, D] (wq_a over wkv); up: [H d, q], for index sources with index wq_b below; sink: [H];
    wo_a: [groups, o_lora, H d / groups]; wo_b: [D, groups o_lora]; index_weights: [index_heads, D];
    w13: [E, 2 I, D], w2: [E, D, I]; shared likewise without E.
    """

    ratio: int
    mix_attn: MixWeights
    mix_ffn: MixWeights
    attn_norm: Tensor
    ffn_norm: Tensor
    down: Tensor
    q_norm: Tensor
    kv_norm: Tensor
    up: Tensor
    sink: Tensor
    wo_a: Tensor
    wo_b: Tensor
    gate: Tensor
    gate_bias: Tensor
    w13: Tensor
    w2: Tensor
    shared_w13: Tensor
    shared_w2: Tensor
    compressor: CompressorWeights | None
    index_weights: Tensor | None
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """embed: bf16 [V, D], a gather; norm: [D]; head: fp32 [V, D], laid out for products of few rows (columns first)."""

    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: tuple[LayerWeights, ...]


def load_weights(checkpoint: Checkpoint) -> ModelWeights:
    """De-quantise and join everything once, and settle how this process multiplies with it (kernels/row_linear.py)."""
    weights = ModelWeights(
        embed=checkpoint.tensors["embed.weight"],
        head=checkpoint.weight("head.weight", Format.BF16).t().contiguous().t(),
        norm=checkpoint.weight("norm.weight", Format.BF16),
        layers=tuple(_layer(_Reader(checkpoint, i), checkpoint.config, i) for i in range(checkpoint.config.layers)),
    )
    settle(_matrices(weights))
    return weights


def _matrices(weights: ModelWeights) -> Iterator[Tensor]:
    """Everything that rows are multiplied with, [N, K] each."""
    yield weights.head
    for layer in weights.layers:
        yield from (layer.mix_attn.fn, layer.mix_ffn.fn, layer.down, layer.up, *layer.wo_a, layer.wo_b, layer.gate)
        yield from (*layer.w13, *layer.w2, layer.shared_w13, layer.shared_w2)
        if layer.compressor is not None:
            yield from (layer.compressor.wkv, layer.compressor.wk)
        if layer.index_weights is not None:
            yield layer.index_weights
        if layer.engram is not None:
            yield layer.engram.wkv


class _Reader:
    """De-quantising access to one layer's tensors."""

    def __init__(self, checkpoint: Checkpoint, layer: int) -> None:
        self.checkpoint = checkpoint
        self.prefix = f"layers.{layer}."

    def bf16(self, name: str) -> Tensor:
        return self.checkpoint.weight(self.prefix + name, Format.BF16)

    def fp32(self, name: str) -> Tensor:
        return self.checkpoint.weight(self.prefix + name, Format.FP32)

    def fp8(self, *names: str) -> Tensor:
        return torch.cat([self.checkpoint.weight(self.prefix + name, Format.FP8) for name in names])

    def experts(self, count: int, *names: str) -> Tensor:
        def one(expert: int) -> Tensor:
            full = [f"{self.prefix}ffn.experts.{expert}.{name}" for name in names]
            return torch.cat([self.checkpoint.weight(name, Format.MXFP4) for name in full])

        return torch.stack([one(expert) for expert in range(count)])


def _layer(read: _Reader, c: TorchConfig, layer: int) -> LayerWeights:
    indexes = layer in c.index_sources
    return LayerWeights(
        ratio=c.ratios[layer],
        mix_attn=_mix(read, c, "attn"),
        mix_ffn=_mix(read, c, "ffn"),
        attn_norm=read.bf16("attn_norm.weight"),
        ffn_norm=read.bf16("ffn_norm.weight"),
        down=read.fp8("attn.wq_a", "attn.wkv"),
        q_norm=read.bf16("attn.q_norm.weight"),
        kv_norm=read.bf16("attn.kv_norm.weight"),
        up=read.fp8("attn.wq_b", *(["attn.indexer.wq_b"] if indexes else [])),
        sink=read.fp32("attn.attn_sink"),
        wo_a=read.fp8("attn.wo_a").view(c.o_groups, c.o_lora, -1),
        wo_b=read.fp8("attn.wo_b"),
        gate=read.bf16("ffn.gate.weight"),
        gate_bias=read.fp32("ffn.gate.bias"),
        w13=read.experts(c.experts, "w1", "w3"),
        w2=read.experts(c.experts, "w2"),
        shared_w13=read.fp8("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
        shared_w2=read.fp8("ffn.shared_experts.w2"),
        compressor=_compressor(read, c.ratios[layer]) if layer in c.kv_sources else None,
        index_weights=read.bf16("attn.indexer.weights_proj.weight") if indexes else None,
        engram=_engram(read) if c.engram is not None and layer in c.engram.layers else None,
    )


def _mix(read: _Reader, c: TorchConfig, part: str) -> MixWeights:
    sizes = torch.tensor([c.streams, c.streams, c.streams**2])
    gain = read.fp32(f"hc_{part}_scale").repeat_interleave(sizes)
    return MixWeights(fn=read.fp32(f"hc_{part}_fn"), gain=gain, base=read.fp32(f"hc_{part}_base"))


def _compressor(read: _Reader, ratio: int) -> CompressorWeights:
    names = ["wkv", "wgate"] if ratio == 2 else ["wkv"]
    return CompressorWeights(
        wkv=torch.cat([read.bf16(f"attn.compressor.{name}.weight") for name in names]),
        norm=read.bf16("attn.compressor.norm.weight"),
        wk=read.bf16("attn.indexer.wk.weight"),
        k_norm=read.bf16("attn.indexer.k_norm.weight"),
    )


def _engram(read: _Reader) -> EngramWeights:
    tensors = read.checkpoint.tensors
    return EngramWeights(
        codes=tensors[f"{read.prefix}engram.embed.weight"].view(torch.uint8),
        scale=tensors[f"{read.prefix}engram.embed.scale"].view(torch.uint8),
        wkv=read.fp8("engram.wkv"),
        gate=read.bf16("engram.q_weight") * read.bf16("engram.k_weight"),
    )
