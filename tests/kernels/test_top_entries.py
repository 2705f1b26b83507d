from __future__ import annotations

import pytest
import torch

from kernels.top_entries import (
    _chosen,
    candidate_mask,
    chosen_triton,
    hide_invisible,
    top_entries,
    top_entries_triton,
)


def random(*shape: int, seed: int = 18) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_choice(scores: torch.Tensor, visible: int, k: int) -> list[int]:
    best = sorted(range(visible), key=lambda i: (-scores[i].item(), i))[:k]
    return sorted(best) + [-1] * (k - len(best))


@pytest.mark.parametrize("entries", [0, 1, 7, 8, 9, 40])
def test_the_best_visible_entries_are_chosen_and_ties_go_to_the_lowest_index(entries):
    scores = torch.randint(-2, 3, (60, entries), generator=torch.Generator().manual_seed(21)).float()
    visible = torch.arange(60) % (entries + 1)
    index = top_entries(hide_invisible(scores.clone(), visible), visible, 8)
    assert index.tolist() == [plain_choice(scores[row], int(visible[row]), 8) for row in range(60)]


def test_damaged_scores_are_never_chosen_before_sound_ones():
    scores = torch.tensor([[float("nan")] * 5 + [1.0] * 20])
    index = top_entries(hide_invisible(scores, torch.tensor([25])), torch.tensor([25]), 8)
    assert index.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]


def test_a_small_context_has_no_candidate_pool():
    assert candidate_mask(torch.zeros(2, 32), torch.tensor([32, 5]), 4, 8) is None


def test_candidates_are_the_best_blocks_and_the_newest_one():
    scores = random(5, 100)
    visible = torch.tensor([100, 90, 33, 9, 1])
    mask = candidate_mask(hide_invisible(scores, visible), visible, 4, 8)
    assert mask is not None
    for row, end in enumerate(visible.tolist()):
        best = [scores[row, b * 8 : min(b * 8 + 8, end)].max().item() if b * 8 < end else -1e9 for b in range(13)]
        best[(end - 1) // 8] = 1e9
        blocks = sorted(range(13), key=lambda b: (-best[b], b))[:4]
        chosen = {b for b in range(13) if mask[row, b * 8]}
        assert chosen == set(blocks)
        assert mask[row].sum() == sum(min(8, 100 - 8 * b) for b in blocks)


def ranked(kind: str, rows: int, entries: int) -> torch.Tensor:
    """Scores that are hard to rank."""
    scores = random(rows, entries)
    match kind:
        case "ties":
            scores = scores.round()
            scores[:, ::3] = -0.0
        case "equal":
            scores = torch.zeros(rows, entries)
        case "extreme":
            scores = scores * torch.exp2(random(rows, entries, seed=4) * 60)
            scores[:, 1::7], scores[:, 2::7], scores[:, 3::7] = float("inf"), float("-inf"), 1e-45
    return scores


@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "extreme"])
@pytest.mark.parametrize(("entries", "k"), [(9, 8), (2500, 512), (33, 1)])
def test_the_kernel_chooses_as_the_reference_does(poisoned, kind, entries, k):
    visible = torch.tensor([entries, k, 1, 0, entries - 1])
    scores = hide_invisible(ranked(kind, 5, entries), visible)
    assert torch.equal(top_entries_triton(scores, visible, k), top_entries(scores, visible, k))
    assert torch.equal(chosen_triton(scores, k), _chosen(scores, k))


def test_the_kernel_never_prefers_damaged_scores(poisoned):
    scores = torch.tensor([[float("nan")] * 5 + [-1e38] * 20])
    assert top_entries_triton(scores, torch.tensor([25]), 8).tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]


def test_the_kernel_with_no_rows(poisoned):
    assert top_entries_triton(torch.zeros(0, 20), torch.zeros(0, dtype=torch.int64), 8).shape == (0, 8)
