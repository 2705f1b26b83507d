"""The model's numbers, read from an official config.json and checked once.

Source: facts-model 1 (keys and defaults), 2 (topology rules), 13 (constraints on widths).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.rope import Yarn

BACKTRACKING = 12  # ring rows beyond the window, for drafts to roll back. Source: facts-model 7.1 (keep 140 = 128 + 12)
RATIOS = (0, 2, 1)  # in the order in which they may follow each other. Source: facts-model 2


class ConfigError(ValueError):
    """A config.json this engine cannot run; the message names the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramConfig:
    """The hashed n-gram memory. rows: entries of each layer's table, in the order of `layers`."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    max_ngram: int
    vocab_size: int
    heads: int
    head_dim: int
    pad_id: int
    compressed_vocab_size: int

    @property
    def width(self) -> int:
        """Channels of one looked-up row set: (max_ngram - 1) * heads * head_dim."""
        return (self.max_ngram - 1) * self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConfig:
    """Everything the engine needs to know of a checkpoint; names are short forms of the official keys.

    Raises: ConfigError from `from_json` and `read` only; a constructed one is trusted.
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    swiglu_limit: float
    norm_eps: float
    max_positions: int
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    moe_inter: int
    experts: int
    experts_per_token: int
    routed_factor: float
    window: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source: int
    candidate_blocks: int
    candidate_block_size: int
    streams: int
    sinkhorn_iterations: int
    hc_eps: float
    engram: EngramConfig | None
    eos_id: int
    bos_id: int
    backtracking: int = BACKTRACKING

    @property
    def first_decoder(self) -> int:
        """The first layer of ratio 1: everything before it is the encoder half."""
        return self.ratios.index(1)

    @property
    def keep(self) -> int:
        """Rows the decoder half runs on at a prompt's end, and slots of a ring."""
        return self.window + self.backtracking

    def kv_source(self, layer: int) -> int:
        """The layer whose global KV `layer` reads. Only for ratios above zero."""
        return max(s for s in self.kv_sources if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose Top-K `layer` reads. Only for ratios above zero."""
        return max(s for s in self.index_sources if s <= layer)

    @classmethod
    def read(cls, path: Path) -> TorchConfig:
        """From a file. Raises: ConfigError, also when the file is missing or no JSON object."""
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: not a JSON object")
        return cls.from_json(found)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> TorchConfig:
        """From the content of config.json. Raises: ConfigError naming the key."""
        text = _Keys(found.get("text_config", found), "text_config." if "text_config" in found else "")
        _fixed(text)
        config = cls(
            vocab_size=text.count("vocab_size"),
            hidden=text.count("hidden_size"),
            layers=text.count("num_hidden_layers"),
            heads=text.count("num_attention_heads"),
            head_dim=text.count("head_dim"),
            rope_dim=text.count("qk_rope_head_dim"),
            q_lora=text.count("q_lora_rank"),
            o_lora=text.count("o_lora_rank"),
            o_groups=text.count("o_groups"),
            swiglu_limit=text.number("swiglu_limit"),
            norm_eps=text.number("rms_norm_eps"),
            max_positions=text.count("max_position_embeddings"),
            rope_theta=text.number("rope_theta"),
            compress_rope_theta=text.number("compress_rope_theta"),
            yarn=_yarn(text),
            moe_inter=text.count("moe_intermediate_size"),
            experts=text.count("n_routed_experts"),
            experts_per_token=text.count("num_experts_per_tok"),
            routed_factor=text.number("routed_scaling_factor"),
            window=text.count("sliding_window"),
            ratios=text.counts("compress_ratios", least=0)[: text.count("num_hidden_layers")],
            kv_sources=text.counts("kv_source_layer_ids", least=0),
            index_sources=text.counts("index_source_layer_ids", least=0),
            index_heads=text.count("index_n_heads"),
            index_head_dim=text.count("index_head_dim"),
            index_topk=text.count("index_topk"),
            candidate_source=text.count("candidate_source_layer_id", least=0),
            candidate_blocks=text.count("candidate_topk_blocks"),
            candidate_block_size=text.count("candidate_block_size"),
            streams=text.count("hc_mult"),
            sinkhorn_iterations=text.count("hc_sinkhorn_iters"),
            hc_eps=text.number("hc_eps"),
            engram=_engram(text),
            eos_id=_Keys(found, "").count("eos_token_id", least=0, default=1),
            bos_id=_Keys(found, "").count("bos_token_id", least=0, default=0),
        )
        _check_topology(config)
        _check_widths(config)
        return config


class _Keys:
    """Typed access to one JSON object; every complaint names the key."""

    def __init__(self, found: object, prefix: str) -> None:
        if not isinstance(found, Mapping):
            raise ConfigError(f"{prefix.rstrip('.') or 'config'}: must be an object")
        self.found: Mapping[str, Any] = found
        self.prefix = prefix

    def get(self, key: str, default: object = None) -> Any:
        value = self.found.get(key, default)
        if value is None:
            raise ConfigError(f"{self.prefix}{key}: missing")
        return value

    def count(self, key: str, *, least: int = 1, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{self.prefix}{key}: must be a whole number of at least {least}, not {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self.prefix}{key}: must be a positive number, not {value!r}")
        return float(value)

    def counts(self, key: str, *, least: int) -> tuple[int, ...]:
        value = self.get(key)
        good = isinstance(value, list) and all(type(v) is int and v >= least for v in value)
        if not good:
            raise ConfigError(f"{self.prefix}{key}: must be a list of whole numbers, not {value!r}")
        return tuple(value)

    def must_be(self, key: str, want: object) -> None:
        if (value := self.found.get(key, want)) != want:
            raise ConfigError(f"{self.prefix}{key}: this engine knows only {want!r}, not {value!r}")

    def fault(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.prefix}{key}: {why}")


def _fixed(text: _Keys) -> None:
    """Keys whose other values mean another architecture. Source: facts-model 1 (defaults of optional keys)."""
    for key, want in (
        ("model_type", "deepseek_v41_text"),
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("tie_word_embeddings", False),
        ("gate_temp", 1.0),
        ("hc_shifted", True),
        ("use_fp4_sparse_kv", True),
    ):
        text.must_be(key, want)
    text.must_be("index_k_source_layer_ids", text.get("kv_source_layer_ids"))


def _yarn(text: _Keys) -> Yarn | None:
    if text.found.get("rope_scaling") is None:
        return None
    keys = _Keys(text.found["rope_scaling"], f"{text.prefix}rope_scaling.")
    keys.must_be("rope_type", "yarn")
    return Yarn(
        factor=keys.number("factor"),
        beta_fast=keys.number("beta_fast"),
        beta_slow=keys.number("beta_slow"),
        original_positions=keys.count("original_max_position_embeddings"),
    )


def _engram(text: _Keys) -> EngramConfig | None:
    if not text.found.get("engram_layer_ids"):
        return None
    return EngramConfig(
        layers=text.counts("engram_layer_ids", least=0),
        rows=text.counts("engram_num_embeddings", least=1),
        max_ngram=text.count("engram_max_ngram_size", least=2),
        vocab_size=text.count("engram_vocab_size", least=2),
        heads=text.count("engram_n_heads"),
        head_dim=text.count("engram_head_dim"),
        pad_id=text.count("engram_pad_token_id", least=0),
        compressed_vocab_size=text.count("engram_compressed_vocab_size"),
    )


def _require(good: bool, key: str, why: str) -> None:
    if not good:
        raise ConfigError(f"{key}: {why}")


def _check_topology(c: TorchConfig) -> None:
    """Source: facts-model 2: sharing never crosses a change of ratio, sources come first in their segment."""
    _require(len(c.ratios) == c.layers, "compress_ratios", f"needs at least {c.layers} entries, one per layer")
    places = [RATIOS.index(r) if r in RATIOS else -1 for r in c.ratios]
    _require(-1 not in places and places == sorted(places), "compress_ratios", "must be zeros, then twos, then ones")
    _require(1 in c.ratios, "compress_ratios", "needs decoder layers (ratio 1)")
    _require(c.ratios[0] == 0, "compress_ratios", "the first layer must be local (ratio 0)")
    firsts = {c.ratios.index(r) for r in (1, 2) if r in c.ratios}
    for key, sources in (("kv_source_layer_ids", c.kv_sources), ("index_source_layer_ids", c.index_sources)):
        _require(sources == tuple(sorted(set(sources))), key, "must be ascending and distinct")
        _require(all(s < c.layers and c.ratios[s] > 0 for s in sources), key, "must name layers with global KV")
        _require(firsts <= set(sources), key, f"must hold {sorted(firsts)}, the first layers of each ratio")
    _require(set(c.kv_sources) <= set(c.index_sources), "index_source_layer_ids", "must hold every KV source")
    decoder = [s for s in c.kv_sources if c.ratios[s] == 1]
    _require(decoder == [c.first_decoder], "kv_source_layer_ids", "the decoder half has one source, its first layer")
    _require(c.candidate_source == c.first_decoder, "candidate_source_layer_id", "must be the first decoder layer")
    _require(
        c.candidate_blocks * c.candidate_block_size >= c.index_topk, "candidate_topk_blocks", "pool below index_topk"
    )
    _require(c.experts_per_token <= c.experts, "num_experts_per_tok", "more than there are experts")
    if c.engram is not None:
        _require(len(c.engram.rows) == len(c.engram.layers), "engram_num_embeddings", "one size per Engram layer")
        _require(max(c.engram.layers) < c.first_decoder, "engram_layer_ids", "must be encoder layers")


def _check_widths(c: TorchConfig) -> None:
    """Source: facts-model 13: quantised widths are whole blocks of 32 (and head_dim of 16, which follows)."""
    _require(c.heads % c.o_groups == 0, "o_groups", "must divide num_attention_heads")
    for key, width in (
        ("hidden_size", c.hidden),
        ("head_dim", c.head_dim),
        ("q_lora_rank", c.q_lora),
        ("moe_intermediate_size", c.moe_inter),
        ("index_head_dim", c.index_head_dim),
        ("o_lora_rank", c.o_lora * c.o_groups),
        ("engram_head_dim", c.engram.head_dim if c.engram else 32),
    ):
        _require(width % 32 == 0, key, f"{width} channels are not whole blocks of 32")
    _require(c.rope_dim % 2 == 0 and c.rope_dim <= c.head_dim, "qk_rope_head_dim", "must be even and within head_dim")
    _require(c.rope_dim <= c.index_head_dim, "qk_rope_head_dim", "must be within index_head_dim")
