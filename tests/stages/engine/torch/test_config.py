from __future__ import annotations

import json
from typing import Any

import pytest

from stages.engine.torch.config import ConfigError, TorchConfig
from tests.stages.engine.torch.conftest import GOLDEN

# the released model's numbers (facts-model 1)
RELEASED: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
}


def config(**changes: Any) -> dict[str, Any]:
    text = {k: v for k, v in (RELEASED | changes).items() if v is not ...}
    return {"model_type": "deepseek_v41", "eos_token_id": 1, "bos_token_id": 0, "text_config": text}


def test_the_released_config_is_read():
    c = TorchConfig.from_json(config())
    assert (c.hidden, c.layers, c.heads, c.head_dim) == (5120, 40, 64, 512)
    assert len(c.ratios) == 40  # the draft layers' ratios are left out
    assert c.first_decoder == 20
    assert c.keep == 140
    assert [c.kv_source(layer) for layer in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [c.index_source(layer) for layer in (3, 13, 20, 23, 24, 39)] == [2, 8, 20, 20, 24, 36]
    assert c.engram is not None
    assert c.engram.width == 6144


def test_the_golden_config_is_read():
    c = TorchConfig.read(GOLDEN / "config.json")
    assert (c.window, c.keep, c.eos_id, c.bos_id) == (16, 28, 1, 0)


@pytest.mark.parametrize("key", [k for k in RELEASED if k not in {
    "model_type", "num_key_value_heads", "hidden_act", "attention_bias", "tie_word_embeddings", "rope_scaling",
    "n_shared_experts", "scoring_func", "topk_method", "norm_topk_prob", "num_nextn_predict_layers",
    "engram_layer_ids",
}])  # fmt: skip
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"text_config.{key}: missing"):
        TorchConfig.from_json(config(**{key: ...}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "5120"),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("hidden_size", 5121),
        ("rms_norm_eps", None),
        ("rope_theta", -1),
        ("num_key_value_heads", 8),
        ("scoring_func", "sigmoid"),
        ("hc_shifted", False),
        ("use_fp4_sparse_kv", False),
        ("index_k_source_layer_ids", [2, 8]),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", 16),
        ("compress_ratios", [0, 0, 4] + [2] * 17 + [1] * 20),
        ("compress_ratios", [0, 0] + [1] * 18 + [2] * 20),
        ("compress_ratios", [0] * 40),
        ("compress_ratios", [0, 0, 2]),
        ("compress_ratios", [2] * 20 + [1] * 20),
        ("compress_ratios", "0,0"),
        ("kv_source_layer_ids", [8, 14, 20]),
        ("kv_source_layer_ids", [2, 8, 20, 14]),
        ("kv_source_layer_ids", [0, 2, 20]),
        ("kv_source_layer_ids", [2, 8, 14, 20, 24]),
        ("index_source_layer_ids", [2, 8, 20, 24]),
        ("index_source_layer_ids", [2, 8, 14, 20, 40]),
        ("candidate_source_layer_id", 24),
        ("candidate_topk_blocks", 10),
        ("num_experts_per_tok", 385),
        ("engram_layer_ids", [1, 20]),
        ("engram_num_embeddings", [384006168]),
        ("o_groups", 7),
        ("qk_rope_head_dim", 63),
        ("qk_rope_head_dim", 256),
        ("index_head_dim", 48),
    ],
)
def test_a_wrong_value_is_named(key, value):
    with pytest.raises(ConfigError, match=key.replace("scaling", "scaling(.rope_type)?")):
        TorchConfig.from_json(config(**{key: value}))


def test_a_model_without_engram_or_yarn_is_read():
    c = TorchConfig.from_json(config(engram_layer_ids=[], rope_scaling=None))
    assert c.engram is None
    assert c.yarn is None


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_a_file_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config.json"):
        TorchConfig.read(tmp_path / "config.json")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        TorchConfig.read(tmp_path / "config.json")


def test_a_text_config_may_stand_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    assert TorchConfig.read(tmp_path / "config.json").hidden == 5120
