"""One forward pass over the rows of a step, equation by equation.

Letters: T rows, D hidden, n streams, H heads, d head_dim.
Source: facts-model 3 (order of operations, rounding points), 2.1 (the cut between encoder and decoder half).
Where facts-model 7 lists a rounding of the wo_a input only for DeepInfer, we follow the ports: it stays fp32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.activation import swiglu
from kernels.compress import pool_pairs
from kernels.engram_gate import engram_gate
from kernels.expert_linear import combine_rows, dispatch, expert_linear, scatter_rows
from kernels.mhc import collapse, expand, mixes
from kernels.moe_gate import moe_gate
from kernels.quant_fp4 import fake_index, pack_index, pack_main
from kernels.quant_fp8 import fake_q8, pack_q8, unpack_q8
from kernels.rmsnorm import rmsnorm
from kernels.rope import rope_frequencies, rope_table, rotate
from kernels.row_linear import grouped_linear, row_linear
from kernels.sparse_attention import sparse_attention
from stages.engine.torch.config import TorchConfig
from stages.engine.torch.engram import Engram, Ids
from stages.engine.torch.kv_bytes import KVBytes, Places
from stages.engine.torch.rows import Rows
from stages.engine.torch.weights import CompressorWeights, EngramWeights, LayerWeights, ModelWeights


class Model:
    """The network; stateless between steps."""

    def __init__(self, config: TorchConfig, weights: ModelWeights, engram: Engram | None, kv: KVBytes) -> None:
        self.config, self.weights, self.engram, self.kv = config, weights, engram, kv
        local = rope_frequencies(config.rope_dim, config.rope_theta)
        scaled = rope_frequencies(config.rope_dim, config.compress_rope_theta, config.yarn)
        self.rope_local = rope_table(local, config.max_positions)
        self.rope_global = rope_table(scaled, config.max_positions)

    def forward(self, rows: Rows, ids: Ids, grams: Ids | None) -> Tensor | None:
        """The normed output of the rows that the decoder half runs on, [T', D], or None when there are none.

        ids: [T] tokens of the rows; grams: [T, max_ngram] of `Engram.grams`, None without Engram. Writes the KV.
        """
        c = self.config
        embedded = self.weights.embed.index_select(0, torch.from_numpy(ids)).float()
        streams = embedded.unsqueeze(1).expand(-1, c.streams, -1).contiguous()
        pre = torch.zeros(len(ids), c.streams)
        pre[:, 0] = 1
        rope = self._rope_rows(rows)
        for number, layer in enumerate(self.weights.layers):
            if layer.engram is not None and self.engram is not None and grams is not None:
                streams = self._add_engram(number, layer.engram, streams, grams)
            x = rmsnorm(collapse(streams, pre), layer.attn_norm, c.norm_eps)
            if layer.compressor is not None:
                self._write_global(number, layer.compressor, layer.ratio, x, rows)
            if number == c.first_decoder:
                if (kept := rows.kept()) is None:
                    return None
                rows, part = kept
                x, streams, pre = x[part], streams[part], pre[part]
                rope = self._rope_rows(rows)
            mix = mixes(streams, layer.mix_attn, iterations=c.sinkhorn_iterations, eps=c.hc_eps, norm_eps=c.norm_eps)
            streams = expand(streams, self._attention(number, layer, x, rows, rope[layer.ratio > 0]), mix)
            x = rmsnorm(collapse(streams, mix.pre), layer.ffn_norm, c.norm_eps)
            mix = mixes(streams, layer.mix_ffn, iterations=c.sinkhorn_iterations, eps=c.hc_eps, norm_eps=c.norm_eps)
            streams = expand(streams, self._experts(layer, x), mix)
            pre = mix.pre
        return rmsnorm(collapse(streams, pre), self.weights.norm, c.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, vocab_size] fp32."""
        return row_linear(hidden, self.weights.head)

    def _rope_rows(self, rows: Rows) -> tuple[Tensor, Tensor]:
        return self.rope_local.index_select(0, rows.positions), self.rope_global.index_select(0, rows.positions)

    def _attention(self, number: int, layer: LayerWeights, x: Tensor, rows: Rows, rope: Tensor) -> Tensor:
        c = self.config
        down = row_linear(fake_q8(x), layer.down)
        qr = rmsnorm(down[:, : c.q_lora], layer.q_norm, c.norm_eps)
        kv = rotate(rmsnorm(down[:, c.q_lora :], layer.kv_norm, c.norm_eps), rope)
        up = row_linear(fake_q8(qr), layer.up)
        width = c.heads * c.head_dim
        q = rotate(up[:, :width].reshape(-1, c.heads, c.head_dim), rope)
        window, seen = rows.window_keys(number, *pack_q8(kv))
        if layer.index_weights is not None:
            index_q = rotate(up[:, width:].reshape(-1, c.index_heads, c.index_head_dim), rope)
            rows.choose(number, fake_index(index_q), row_linear(x, layer.index_weights))
        chosen = rows.chosen() if layer.ratio else (None, None)
        out = rotate(sparse_attention(q, window, seen, layer.sink, *chosen), rope, inverse=True)
        z = grouped_linear(out.view(len(x), c.o_groups, -1), layer.wo_a)
        return row_linear(fake_q8(z), layer.wo_b)

    def _write_global(self, number: int, w: CompressorWeights, ratio: int, x: Tensor, rows: Rows) -> None:
        part = x[rows.written()]
        if not len(part):
            return
        latent = row_linear(part, w.wkv)
        if ratio == 2:
            pairs, at = rows.pairs(number, latent)
            latent = pool_pairs(*pairs.chunk(2, dim=-1))
        else:
            at = rows.places(number)
        if len(latent):
            self._store(number, w, rmsnorm(latent, w.norm, self.config.norm_eps), at)

    def _store(self, number: int, w: CompressorWeights, latent: Tensor, at: Places) -> None:
        rope = self.rope_global.index_select(0, torch.from_numpy(at.positions))
        keys = rotate(rmsnorm(row_linear(latent, w.wk), w.k_norm, self.config.norm_eps), rope)
        self.kv.write_entries(number, at, pack_main(rotate(latent, rope)), *pack_index(keys))

    def _experts(self, layer: LayerWeights, x: Tensor) -> Tensor:
        c = self.config
        experts, weights = moe_gate(row_linear(x, layer.gate), layer.gate_bias, c.experts_per_token, c.routed_factor)
        to = dispatch(experts, c.experts)
        rounded = fake_q8(x)
        hidden = swiglu(expert_linear(scatter_rows(rounded, to), layer.w13, to), c.swiglu_limit)
        scale = hidden.new_zeros(to.rows, 1)
        scale[to.place.flatten(), 0] = weights.flatten()
        routed = combine_rows(expert_linear(fake_q8(hidden.mul_(scale)), layer.w2, to), to)
        shared = swiglu(row_linear(rounded, layer.shared_w13), c.swiglu_limit)
        return routed.add_(row_linear(fake_q8(shared), layer.shared_w2))

    def _add_engram(self, number: int, w: EngramWeights, streams: Tensor, grams: Ids) -> Tensor:
        assert self.engram is not None  # noqa: S101  forward has checked it
        found = torch.from_numpy(self.engram.layers[number].rows(np.ascontiguousarray(grams)))
        packed = torch.cat([w.codes[found.flatten()], w.scale[found.flatten()]], -1)
        looked_up = unpack_q8(packed).view(len(streams), -1)
        kv = row_linear(looked_up, w.wkv)
        keys, value = kv[:, : -self.config.hidden].view_as(streams), kv[:, -self.config.hidden :]
        return engram_gate(streams, keys, value, w.gate, self.config.norm_eps)
