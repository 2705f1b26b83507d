"""One prefill by itself: every logit of a prompt, without scheduler, pipeline or sampling. To check a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from kv.plan import plan
from stages.engine.interface import BLOCK_TOKENS, KVMemory, SamplingParams, Sequence, Tokens
from stages.engine.torch.checkpoint import Checkpoint
from stages.engine.torch.runner import TorchRunner, model_card

CHUNK_TOKENS = 512
_GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, max_tokens=1, eos_ids=(), ignore_eos=True)


def prefill_logits(checkpoint: Checkpoint, ids: Tokens, *, keep: int | None = None) -> npt.NDArray[np.float32]:
    """Logits of the last `keep` positions (None: all) of one cold prefill, [rows, vocab_size] fp32.

    ids: [n]. keep: rows that the decoder half runs on (facts-model 2.1), at least a window: what it drops, later rows
    do not see there.
    Raises: ValueError for no ids or too few rows, SequenceError when ids do not fit the model.
    """
    config = checkpoint.config
    rows = len(ids) if keep is None else keep
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"ids must be one row of at least one token, not of shape {list(ids.shape)}")
    if keep is not None and keep < config.window:
        raise ValueError(f"keep must be at least the window of {config.window} rows, not {keep}")
    config = replace(config, backtracking=max(rows, config.window) - config.window)
    checkpoint = replace(checkpoint, config=config)
    card = model_card(checkpoint)
    num_blocks = -(-len(ids) // BLOCK_TOKENS)
    memory = KVMemory(
        blocks=np.zeros((num_blocks, card.layout.block_bytes), np.uint8),
        states=np.zeros((1, card.layout.state_bytes), np.uint8),
    )
    runner = TorchRunner(checkpoint, memory)
    seq = _sequence(ids, card.keep_tokens, card.window_tokens, card.replay_windows, num_blocks)
    chunks = (
        runner.prefill_hidden(seq, start, min(start + CHUNK_TOKENS, len(ids)))
        for start in range(0, len(ids), CHUNK_TOKENS)
    )
    logits = [runner.logits(hidden) for hidden in chunks if hidden is not None]
    found: npt.NDArray[np.float32] = torch.cat(logits).numpy()[-rows:]
    return found


def _sequence(ids: Tokens, keep: int, window: int, windows: int, num_blocks: int) -> Sequence:
    return Sequence(
        rid="0" * 32,
        attempt=0,
        choice=0,
        ids=ids.astype(np.uint32),
        tail_ids=ids[-3:].astype(np.uint32),
        num_prompt_tokens=len(ids),
        plan=plan(len(ids), 0, keep=keep, window=window, windows=windows),
        block_table=list(range(num_blocks)),
        state_slot=0,
        seed=0,
        sampling=_GREEDY,
    )
