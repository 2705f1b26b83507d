"""The rows of one step and the KV they see: consecutive positions of one prompt, or one position of many sequences.

The model asks its rows for everything that depends on where KV lies and who may see it, and so has one forward
pass for both. Letters: T rows, W window, d head_dim, N entries, k chosen entries.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.top_entries import candidate_mask, hide_invisible, top_entries
from stages.engine.torch.config import TorchConfig
from stages.engine.torch.kv_bytes import Places


class Rows(Protocol):
    """What the model needs to know of a step. positions: [T] int64."""

    positions: Tensor

    def window_keys(self, layer: int, packed: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store this step's window rows; keys [T, W, d] in order of position, and which are seen [T, W]."""
        ...

    def written(self) -> slice:
        """The rows whose global KV is to be written."""
        ...

    def places(self, source: int) -> Places:
        """Where the entries of the `written` rows go, for a source of ratio 1."""
        ...

    def pairs(self, source: int, opened: Tensor) -> tuple[Tensor, Places]:
        """Close pairs with the `written` rows' values and gates [T', 2 d] and keep the newest first token.

        Returns both tokens of each closed pair, [G, 2, 2 d], and where their entries go.
        """
        ...

    def choose(self, layer: int, q: Tensor, weights: Tensor) -> None:
        """Select entries for this layer and those that reuse them."""
        ...

    def chosen(self) -> tuple[Tensor, Tensor]:
        """Keys [T, k, d] of the last selection and which are real [T, k]."""
        ...

    def kept(self) -> tuple[Rows, slice] | None:
        """The rows on which the decoder half runs, and where they are among these; None when there are none."""
        ...


class Selection:
    """Indices of the last `choose` and the candidate pool of the step."""

    def __init__(self, config: TorchConfig) -> None:
        self.config = config
        self.pool: Tensor | None = None

    def select(self, layer: int, scores: Tensor, visible: Tensor) -> Tensor:
        """TopK [T, k] of an index layer; overwrites `scores` [T, N]. The candidate source comes before its users."""
        c = self.config
        hide_invisible(scores, visible)
        if layer == c.candidate_source:
            self.pool = candidate_mask(scores, visible, c.candidate_blocks, c.candidate_block_size)
        elif c.ratios[layer] == 1 and self.pool is not None:
            scores.masked_fill_(~self.pool, float("-inf"))
        return top_entries(scores, visible, c.index_topk)
