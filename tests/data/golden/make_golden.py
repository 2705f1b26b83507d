#!/usr/bin/env python3
"""Make a tiny random V4.1 checkpoint in the official tensor names and number formats, and golden logits from mlx-vlm.

usage: make_golden.py OUT_DIR [--seed N] [--layout a|b] [--tokens N]

OUT_DIR/config.json, model.safetensors   the checkpoint (FP8 32x32 blocks with E8M0 scales, MXFP4 experts, bf16, fp32; facts/model.md 7, 11)
OUT_DIR/engram_token_map.npy             token id -> compressed id (tiny vocabularies have no tokenizer to derive it from)
OUT_DIR/golden.npz                       ids [T]; logits [T, vocab] fp32 of one prefill; streams are not stored

Needs (Linux CPU, Python 3.11): torch==2.13.0 safetensors numpy sympy 'mlx[cpu]' and, with --no-deps, mlx-lm mlx-vlm
(+ transformers sentencepiece requests urllib3 certifi pillow). The weights that mlx-vlm sees are the de-quantised ones, in fp32.
"""
import argparse, json, pathlib
import numpy as np
import torch
from safetensors.torch import save_file

BASE = dict(vocab_size=512, hidden_size=128, num_attention_heads=4, num_key_value_heads=1, head_dim=64, q_lora_rank=32, qk_rope_head_dim=16,
    o_groups=2, o_lora_rank=32, moe_intermediate_size=64, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    scoring_func="sqrtsoftplus", norm_topk_prob=True, routed_scaling_factor=1.5, swiglu_limit=10.0, rms_norm_eps=1e-20, sliding_window=16,
    compress_rope_theta=160000.0, rope_theta=10000.0, candidate_topk_blocks=4, candidate_block_size=8, index_n_heads=16, index_head_dim=32,
    index_topk=8, rope_scaling=dict(rope_type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=64),
    max_position_embeddings=1024, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6)
LAYOUTS = {
    "a": dict(BASE, num_hidden_layers=8, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1], kv_source_layer_ids=[2, 4], index_source_layer_ids=[2, 4, 6],
        candidate_source_layer_id=4, engram_layer_ids=[1, 3]),
    "b": dict(BASE, num_hidden_layers=12, hidden_size=192, num_attention_heads=8, o_groups=4, moe_intermediate_size=96, n_routed_experts=12,
        num_experts_per_tok=3, sliding_window=24, index_topk=12, candidate_topk_blocks=5,
        compress_ratios=[0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1], kv_source_layer_ids=[2, 4, 6], index_source_layer_ids=[2, 4, 6, 8, 10],
        candidate_source_layer_id=6, engram_layer_ids=[1, 4]),
}
ENGRAM = dict(engram_max_ngram_size=4, engram_vocab_size=500, engram_n_heads=2, engram_head_dim=32, engram_pad_token_id=2, engram_compressed_vocab_size=400)

def e8m0(scale):  # power of two -> exponent byte
    return (torch.log2(scale).round() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)

def pow2_scale(amax, top):
    return torch.exp2(torch.ceil(torch.log2(amax.clamp_min(1e-12) / top)))

def fp8_block(w, rows, cols):  # -> (e4m3, scale, de-quantised)
    o, i = w.shape
    pad = torch.zeros(-(-o // rows) * rows, -(-i // cols) * cols); pad[:o, :i] = w
    blk = pad.view(pad.shape[0] // rows, rows, pad.shape[1] // cols, cols)
    s = pow2_scale(blk.abs().amax((1, 3)), 448.0)
    q = (blk / s[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    full = (q.float() * s[:, None, :, None]).reshape(pad.shape)[:o, :i].contiguous()
    return q.reshape(pad.shape)[:o, :i].contiguous(), e8m0(s), full

GRID = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
def mxfp4(w):  # row-wise blocks of 32 -> (packed int8 [o, i/2], scale [o, i/32], de-quantised)
    o, i = w.shape
    blk = w.view(o, i // 32, 32); s = pow2_scale(blk.abs().amax(-1), 6.0)
    x = (blk / s[..., None]).reshape(o, i); mag = x.abs().clamp(max=6)
    lo = (torch.bucketize(mag, GRID, right=True) - 1).clamp(0, 6); hi = lo + 1
    mid = (GRID[lo] + GRID[hi]) / 2
    code = torch.where((mag > mid) | ((mag == mid) & (hi % 2 == 0)), hi, lo)
    val = GRID[code] * torch.sign(x); code = code | ((x < 0).long() << 3)
    packed = (code[:, 0::2] | (code[:, 1::2] << 4)).to(torch.uint8).view(torch.int8)
    return packed, e8m0(s), (val.view(o, i // 32, 32) * s[..., None]).reshape(o, i)

def primes(c):
    from sympy import nextprime
    seen, out = set(), []
    for _ in c["engram_layer_ids"]:
        per = []
        for _ in range(c["engram_max_ngram_size"] - 1):
            cur, row = c["engram_vocab_size"] - 1, []
            for _ in range(c["engram_n_heads"]):
                cur = nextprime(cur)
                while cur in seen: cur = nextprime(cur)
                seen.add(cur); row.append(cur)
            per.append(row)
        out.append(per)
    return np.array(out)

def make_checkpoint(out, layout, seed):
    """The checkpoint alone: needs no mlx."""
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed); c = {**LAYOUTS[layout], **ENGRAM}
    P = primes(c); c["engram_num_embeddings"] = [int(P[i].sum()) for i in range(len(P))]
    n = lambda *s, sc=None: torch.tensor(rng.standard_normal(s) * (s[-1] ** -.5 if sc is None else sc), dtype=torch.float32)
    disk, dense = {}, {}
    def f32(k, t): disk[k] = t; dense[k] = t
    def b16(k, t): disk[k] = t.bfloat16(); dense[k] = disk[k].float()
    def fp8(k, t): q, s, d = fp8_block(t, 32, 32); disk[k + ".weight"] = q; disk[k + ".scale"] = s; dense[k + ".weight"] = d
    def fp4(k, t): q, s, d = mxfp4(t); disk[k + ".weight"] = q; disk[k + ".scale"] = s; dense[k + ".weight"] = d
    norm = lambda d: torch.tensor(1 + .1 * rng.standard_normal(d), dtype=torch.float32)
    D, H, hd, h, I = c["hidden_size"], c["num_attention_heads"], c["head_dim"], c["hc_mult"], c["moe_intermediate_size"]
    b16("embed.weight", n(c["vocab_size"], D, sc=1.)); b16("head.weight", n(c["vocab_size"], D)); b16("norm.weight", norm(D))
    for l in range(c["num_hidden_layers"]):
        p = f"layers.{l}."; a = p + "attn."; f = p + "ffn."
        fp8(a + "wq_a", n(c["q_lora_rank"], D)); b16(a + "q_norm.weight", norm(c["q_lora_rank"])); fp8(a + "wq_b", n(H * hd, c["q_lora_rank"]))
        fp8(a + "wkv", n(hd, D)); b16(a + "kv_norm.weight", norm(hd)); f32(a + "attn_sink", n(H, sc=.5))
        fp8(a + "wo_a", n(c["o_groups"] * c["o_lora_rank"], H * hd // c["o_groups"])); fp8(a + "wo_b", n(D, c["o_groups"] * c["o_lora_rank"]))
        if l in c["kv_source_layer_ids"]:
            b16(a + "compressor.wkv.weight", n(hd, D)); b16(a + "compressor.norm.weight", norm(hd))
            if c["compress_ratios"][l] > 1: b16(a + "compressor.wgate.weight", n(hd, D))
            b16(a + "indexer.wk.weight", n(c["index_head_dim"], hd)); b16(a + "indexer.k_norm.weight", norm(c["index_head_dim"]))
        if l in c["index_source_layer_ids"]:
            fp8(a + "indexer.wq_b", n(c["index_n_heads"] * c["index_head_dim"], c["q_lora_rank"])); b16(a + "indexer.weights_proj.weight", n(c["index_n_heads"], D))
        b16(p + "attn_norm.weight", norm(D)); b16(p + "ffn_norm.weight", norm(D))
        for k in ("attn", "ffn"):
            f32(p + f"hc_{k}_fn", n((2 + h) * h, h * D)); f32(p + f"hc_{k}_base", n((2 + h) * h, sc=.5)); f32(p + f"hc_{k}_scale", torch.tensor(.5 + .5 * rng.random(3), dtype=torch.float32))
        b16(f + "gate.weight", n(c["n_routed_experts"], D)); f32(f + "gate.bias", n(c["n_routed_experts"], sc=.05)); f32(f + "gate.bias_vl", torch.zeros(c["n_routed_experts"]))
        for e in range(c["n_routed_experts"]):
            for m, s in (("w1", (I, D)), ("w3", (I, D)), ("w2", (D, I))): fp4(f + f"experts.{e}.{m}", n(*s))
        for m, s in (("w1", (I, D)), ("w3", (I, D)), ("w2", (D, I))): fp8(f + f"shared_experts.{m}", n(*s))
    cols = 3 * c["engram_n_heads"] * c["engram_head_dim"]
    for j, l in enumerate(c["engram_layer_ids"]):
        p = f"layers.{l}.engram."
        q, s, d = fp8_block(n(c["engram_num_embeddings"][j], c["engram_head_dim"], sc=1.), 1, 32)
        disk[p + "embed.weight"], disk[p + "embed.scale"], dense[p + "embed.weight"] = q, s, d
        fp8(p + "wkv", n(D * (h + 1), cols)); b16(p + "q_weight", norm((h, D))); b16(p + "k_weight", norm((h, D)))
    tmap = np.arange(c["vocab_size"]) % c["engram_compressed_vocab_size"]
    np.save(out / "engram_token_map.npy", tmap)
    text = dict(model_type="deepseek_v41_text", num_nextn_predict_layers=0, **c)
    (out / "config.json").write_text(json.dumps(dict(architectures=["DeepseekV41ForCausalLM"], model_type="deepseek_v41", dtype="bfloat16", bos_token_id=0, eos_token_id=1,
        pad_token_id=2, quantization_config=dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", scale_fmt="ue8m0", weight_block_size=[32, 32], expert_dtype="fp4"),
        text_config=text), indent=1))
    save_file({k: v.contiguous() for k, v in disk.items()}, str(out / "model.safetensors"))

    return rng, c, dense, tmap


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("out"); ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--layout", default="a"); ap.add_argument("--tokens", type=int, default=150); args = ap.parse_args()
    out = pathlib.Path(args.out); rng, c, dense, tmap = make_checkpoint(out, args.layout, args.seed)
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models.deepseek_v41.config import ModelConfig
    from mlx_vlm.models.deepseek_v41 import language as L
    from mlx_vlm.models.deepseek_v41.engram import NgramHashState
    mx.set_default_device(mx.cpu); mx.disable_compile()
    cfg = ModelConfig.from_dict(dict(text_config=dict(c), model_type="deepseek_v41")); lm = L.LanguageModel(cfg)
    lm.engram_hash = NgramHashState(cfg, lm.layout, token_map=list(map(int, tmap)))
    mw = {k: mx.array(v.numpy()) for k, v in dense.items()}; mw["embed_tokens.weight"] = mw.pop("embed.weight")
    for l in range(c["num_hidden_layers"]):
        mw = L.sanitize_moe_weights(mw, f"layers.{l}.ffn", c["n_routed_experts"])
        k = f"layers.{l}.attn.wo_a.weight"; mw[k] = mw[k].reshape(c["o_groups"], c["o_lora_rank"], -1)
    have = {k for k, _ in tree_flatten(lm.parameters())}
    missing, extra = sorted(have - set(mw)), sorted(set(mw) - have)
    assert not missing and not extra, (missing[:5], extra[:5])
    lm.load_weights(list(mw.items())); mx.eval(lm.parameters())
    ids = rng.integers(3, c["vocab_size"], args.tokens)
    logits = np.array(lm(mx.array(ids[None])).logits)[0].astype(np.float32)
    np.savez_compressed(out / "golden.npz", ids=ids.astype(np.uint32), logits=logits)
    print(out, "params", sum(v.numel() for v in dense.values()), "logits", logits.shape, "std", float(logits.std()))

if __name__ == "__main__":
    main()
