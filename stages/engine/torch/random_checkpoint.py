"""Deterministic random checkpoints in the official formats: the embedded demo model, and a tiny one for tests.

Every weight comes from raw PCG64 output alone, which NumPy promises never to change, so the same seed gives the
same bytes, and with them the same fingerprint, on every machine. The model writes nonsense, but real nonsense:
every mechanism of the architecture takes part.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from stages.engine.torch.checkpoint import MAP_FILE
from stages.engine.torch.config import TorchConfig
from stages.engine.torch.engram import primes_from
from stages.engine.torch.tensor_specs import Spec, expected
from stages.engine.torch.weight_formats import store

VERSION = 1  # part of the directory name: raise it with anything that changes the bytes
_HEAD_GAIN = 3.0  # logits of standard deviation 3: a few hundred likely tokens out of 129,280, not all alike

# Source: golden (the generator's; facts-model 13), uniform instead of normal
_SPREADS = {
    "embed.weight": (0.0, 1.0),
    "engram.embed": (0.0, 1.0),
    "norm.weight": (1.0, 0.1),
    "q_weight": (1.0, 0.1),
    "k_weight": (1.0, 0.1),
    "gate.bias": (0.0, 0.05),
    "gate.bias_vl": (0.0, 0.0),
    "attn_sink": (0.0, 0.5),
    "_base": (0.0, 0.5),
    "_scale": (0.75, 0.14),
}

_COMMON: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_hidden_layers": 8,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 500,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 0,
}  # Source: facts-model 13 (tiny-A's topology), facts-spikes 7 (suggested widths below)

DEMO: dict[str, Any] = _COMMON | {
    "vocab_size": 129280,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_topk_blocks": 256,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 8192,
    },
    "engram_compressed_vocab_size": 99092,
}

TINY: dict[str, Any] = DEMO | {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "index_topk": 32,
    "candidate_topk_blocks": 8,
    "max_position_embeddings": 4096,
    "engram_compressed_vocab_size": 400,
}


def demo_checkpoint(cache: Path) -> Path:
    """Directory of the embedded demo model under `cache`; about 70 MB, written on first use."""
    return random_checkpoint(cache, "tidemill-demo", DEMO, seed=41)


def tiny_checkpoint(cache: Path) -> Path:
    """Directory of a model with a vocabulary of 512 under `cache`, for tests: under 1 MB."""
    return random_checkpoint(cache, "tidemill-tiny", TINY, seed=7)


def random_checkpoint(cache: Path, name: str, text_config: dict[str, Any], *, seed: int) -> Path:
    """Write the checkpoint unless it is there; a reader sees all of it or nothing (rename).

    The directory is `cache/{name}-v{VERSION}-s{seed}`. Several processes may call this at once.
    """
    target = cache / f"{name}-v{VERSION}-s{seed}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=cache, prefix=f".{name}-"))
    try:
        _write(building, text_config, seed)
        building.chmod(0o755)
        building.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was first, with the same bytes
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _write(path: Path, text_config: dict[str, Any], seed: int) -> None:
    found = _config(text_config)
    config = TorchConfig.from_json(found)
    (path / "config.json").write_text(json.dumps(found, indent=1))
    tensors = [part for spec in expected(config) for part in store(spec, _weight(spec, seed)).items()]
    save_file(dict(tensors), path / "model.safetensors")
    if config.engram is not None:
        np.save(path / MAP_FILE, np.arange(config.vocab_size) % config.engram.compressed_vocab_size)
    with (path / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())  # the rename must not overtake the data


def _config(text_config: dict[str, Any]) -> dict[str, Any]:
    """config.json around a text config, with the table sizes that the Engram hash needs."""
    layers, grams = len(text_config["engram_layer_ids"]), text_config["engram_max_ngram_size"] - 1
    per_layer = grams * text_config["engram_n_heads"]
    primes = primes_from(text_config["engram_vocab_size"], layers * per_layer)
    sizes = [sum(primes[i * per_layer : (i + 1) * per_layer]) for i in range(layers)]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [32, 32],
            "expert_dtype": "fp4",
        },
        "text_config": text_config | {"engram_num_embeddings": sizes},
    }


def _weight(spec: Spec, seed: int) -> Tensor:
    """One random weight: mean and spread by the end of its name, else 0 and one over the root of its width."""
    default = (0.0, (_HEAD_GAIN if spec.name == "head.weight" else 1.0) * spec.shape[-1] ** -0.5)
    mean, spread = next((pair for end, pair in _SPREADS.items() if spec.name.endswith(end)), default)
    return _noise(spec, seed).mul_(spread).add_(mean)


def _noise(spec: Spec, seed: int) -> Tensor:
    """Uniform numbers of mean 0 and variance 1, a function of seed and name."""
    count = int(np.prod(spec.shape))
    stream = int.from_bytes(blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest(), "little")
    raw = np.random.PCG64(stream).random_raw(-(-count // 2)).view(np.uint32)[:count]
    unit = (raw >> 8).astype(np.float32) * np.float32(2.0**-24)  # 24 bits: exact in fp32
    return torch.from_numpy(unit).sub_(0.5).mul_(12**0.5).view(spec.shape)
