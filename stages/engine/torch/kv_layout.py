"""Which KV components a model has, as a `kv` layout.

| component | kind | entries | bytes of an entry | stored |
|---|---|---|---|---|
| `layer{l}.index` | paged | 128 / ratio | index_head_dim (1/2 + 1/32); in a block all codes, then all scales | yes |
| `layer{l}.main` | paged | 128 / ratio | head_dim (1/2 + 1/16), codes then scales | yes |
| `layer{l}.swa` | ring | window + backtracking | head_dim (1 + 1/32), codes then scales | encoder layers |
| `layer{l}.open` | state | 1 | 8 head_dim: values, then gates, fp32, of an open pair's first token | no |

Source: facts-model 7.1 (formats, arrangement, order, alignment of a block) and 8 (order of the state).
"""

from __future__ import annotations

import math

from kernels.quant_fp4 import INDEX_BLOCK, MAIN_BLOCK
from kernels.quant_fp8 import BLOCK as SWA_BLOCK
from kv.layout import BLOCK_TOKENS, Component, Kind, Layout
from stages.engine.torch.config import TorchConfig

_BLOCK_ALIGN = 128  # bytes; a block is padded to the least common multiple with a main row. Source: facts-model 7.1
_STATE_ALIGN = 64  # one cache line. Source: ours


def index_name(layer: int) -> str:
    """Component of a KV source layer's index keys."""
    return f"layer{layer}.index"


def main_name(layer: int) -> str:
    """Component of a KV source layer's main rows."""
    return f"layer{layer}.main"


def ring_name(layer: int) -> str:
    """Component of a layer's sliding-window rows."""
    return f"layer{layer}.swa"


def open_name(layer: int) -> str:
    """Component of a ratio-2 source layer's open pair."""
    return f"layer{layer}.open"


def layout_of(config: TorchConfig) -> Layout:
    """The layout of this model's blocks and states."""
    main_bytes = config.head_dim // 2 + config.head_dim // MAIN_BLOCK
    index_bytes = config.index_head_dim // 2 + config.index_head_dim // INDEX_BLOCK
    components: list[Component] = []
    for layer in config.kv_sources:
        entries = BLOCK_TOKENS // config.ratios[layer]
        components += [
            Component(name=index_name(layer), kind=Kind.PAGED, entries=entries, entry_bytes=index_bytes),
            Component(name=main_name(layer), kind=Kind.PAGED, entries=entries, entry_bytes=main_bytes),
        ]
    components += [_ring(config, layer) for layer in range(config.layers)]
    components += [
        Component(
            name=open_name(layer), kind=Kind.STATE, entries=1, entry_bytes=8 * config.head_dim, align=4, stored=False
        )
        for layer in config.kv_sources
        if config.ratios[layer] == 2
    ]
    return Layout(
        components=tuple(components),
        block_align=math.lcm(_BLOCK_ALIGN, main_bytes),
        state_align=_STATE_ALIGN,
    )


def _ring(config: TorchConfig, layer: int) -> Component:
    return Component(
        name=ring_name(layer),
        kind=Kind.RING,
        entries=config.keep,
        entry_bytes=config.head_dim + config.head_dim // SWA_BLOCK,
        stored=layer < config.first_decoder,
    )
