"""Decode speed of mlx-vlm's DeepSeek V4.1 on a CPU, for `bench.engine`.

    python bench/peers/mlx_decode.py DIRECTORY

DIRECTORY holds `text_config.json`, `token_map.npy`, `job.json` ({"batches", "prompt", "seconds"}) and `dense.npz`: the
de-quantised weights by official name. Prints one JSON object {batch: tokens per second}. It imports nothing of ours:
any interpreter that has mlx[cpu], mlx-vlm and numpy runs it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.deepseek_v41 import language
from mlx_vlm.models.deepseek_v41.config import ModelConfig
from mlx_vlm.models.deepseek_v41.engram import NgramHashState

WARM_STEPS = 2


def load(directory: Path) -> Any:
    """The oracle with our weights. Raises: ValueError when their names do not match."""
    text = json.loads((directory / "text_config.json").read_text())
    config = ModelConfig.from_dict({"text_config": text, "model_type": "deepseek_v41"})
    model = language.LanguageModel(config)
    token_map = np.load(directory / "token_map.npy").tolist()
    model.engram_hash = NgramHashState(config, model.layout, token_map=token_map)
    weights = {name: mx.array(value) for name, value in np.load(directory / "dense.npz").items()}
    weights["embed_tokens.weight"] = weights.pop("embed.weight")
    for layer in range(text["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        weights = language.sanitize_moe_weights(weights, f"{prefix}.ffn", text["n_routed_experts"])
        weights.setdefault(f"{prefix}.ffn.gate.bias_vl", mx.zeros(text["n_routed_experts"]))
        name = f"{prefix}.attn.wo_a.weight"
        weights[name] = weights[name].reshape(text["o_groups"], text["o_lora_rank"], -1)
    if unlike := {name for name, _ in tree_flatten(model.parameters())} ^ set(weights):
        raise ValueError(f"weights that only one side has: {sorted(unlike)[:8]}")
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model


def decode_tok_s(model: Any, batch: int, prompt: int, seconds: float) -> float:
    """Tokens per second of all rows together, greedy, after one prefill."""
    ids = np.random.default_rng(batch).integers(3, model.config.vocab_size, (batch, prompt))
    cache = model.make_cache()
    token = mx.argmax(model(mx.array(ids), cache=cache).logits[:, -1:], axis=-1)
    mx.eval(token)
    steps, begun = -WARM_STEPS, 0.0
    while steps < 1 or time.perf_counter() - begun < seconds:
        if steps == 0:
            begun = time.perf_counter()
        token = mx.argmax(model(token, cache=cache).logits[:, -1:], axis=-1)
        mx.eval(token)
        steps += 1
    return batch * steps / (time.perf_counter() - begun)


def main() -> None:
    """Print the object."""
    directory = Path(sys.argv[1])
    job = json.loads((directory / "job.json").read_text())
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # its CPU compiler calls g++ for 40 s
    model = load(directory)
    found = {str(b): decode_tok_s(model, b, job["prompt"], job["seconds"]) for b in job["batches"]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
