"""Hit, replay or cold: the one pure function that decides where computing starts.

Letters: n prompt tokens, W sliding window in tokens. `keep` is the number of rows at a prompt's end on which
the decoder half runs; all of them must be computed, so computing starts at or below n - keep whatever hit.

Source: facts-system R28-R34, facts-model 2.1 and 2.2; the exact mode (more than one window): ours.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum

from kv.layout import BLOCK_TOKENS


class PlanError(ValueError):
    """The arguments contradict each other; a caller's fault, never a user's."""


class PlanKind(StrEnum):
    """How a prefill starts."""

    COLD = "cold"  # nothing stored: everything is computed
    HIT = "hit"  # nothing is computed twice below `compute_from`
    REPLAY = "replay"  # window state is missing: tokens below `compute_from` are computed again for it


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """Where one prefill starts, all in tokens. 0 <= replay_from <= compute_from <= hit_tokens < prompt_tokens.

    Positions from `replay_from` on are computed; window keys are visible from `replay_from` on; global KV is
    written from `hit_tokens` on and never below; usage reports `hit_tokens`. `approximate`: the result may
    differ from a cold run, so blocks computed by it must not be hit in exact mode.
    """

    prompt_tokens: int
    hit_tokens: int
    compute_from: int
    replay_from: int
    kind: PlanKind
    approximate: bool = False

    @property
    def replayed_tokens(self) -> int:
        """Tokens computed again only to rebuild window state. They count as hit (facts-system R3)."""
        return self.compute_from - self.replay_from

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the encoder half: what a prefill costs."""
        return self.prompt_tokens - self.replay_from


def plan(
    prompt_tokens: int,
    hit_tokens: int,
    *,
    keep: int,
    window: int,
    windows: int,
    exact_windows: int | None = None,
    snapshots: Container[int] = (),
    block_tokens: int = BLOCK_TOKENS,
) -> KVPlan:
    """Plan a prefill of n = `prompt_tokens`, of which the first `hit_tokens` have their global KV at hand.

    hit_tokens: a multiple of the block; more than fits below n is cut down, one token at least is computed.
    windows: how many windows are replayed when no snapshot lies exactly at the start; 1 is the paper's bounded
    replay, `exact_windows` (the number of encoder layers; default: `windows` is exact) repeats a cold run.
    snapshots: positions at which window state is stored.

    Raises:
        PlanError: an empty prompt, an unaligned or negative hit, or keep, window or windows out of range.
    """
    _check(prompt_tokens, hit_tokens, keep, window, windows, block_tokens)
    hit = min(hit_tokens, _floor(prompt_tokens - 1, block_tokens))
    compute_from = max(0, min(hit, _floor(prompt_tokens - keep, block_tokens)))
    replay_from = compute_from if compute_from in snapshots else max(0, compute_from - windows * window)
    replays = replay_from < compute_from
    # a replay that reaches position 0 has computed everything: exact with any dial
    bounded = replays and replay_from > 0 and windows < (windows if exact_windows is None else exact_windows)
    return KVPlan(
        prompt_tokens=prompt_tokens,
        hit_tokens=hit,
        compute_from=compute_from,
        replay_from=replay_from,
        kind=PlanKind.COLD if hit == 0 else PlanKind.REPLAY if replays else PlanKind.HIT,
        approximate=bounded,
    )


def _floor(tokens: int, block_tokens: int) -> int:
    return tokens // block_tokens * block_tokens


def _check(prompt_tokens: int, hit_tokens: int, keep: int, window: int, windows: int, block_tokens: int) -> None:
    if prompt_tokens < 1:
        raise PlanError(f"a prompt has at least one token, not {prompt_tokens}")
    if block_tokens < 1:
        raise PlanError(f"block_tokens must be at least 1, not {block_tokens}")
    if hit_tokens < 0 or hit_tokens % block_tokens:
        raise PlanError(f"hit_tokens {hit_tokens} is not a multiple of {block_tokens}")
    if window < 1 or windows < 1:
        raise PlanError(f"window {window} and windows {windows} must be at least 1")
    if keep < window:
        raise PlanError(f"keep {keep} is below the window {window}: the decoder half would miss keys")
