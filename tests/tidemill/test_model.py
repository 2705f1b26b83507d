from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden" / "tiny-a"


def logits(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidemill", "model", "logits", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", np.load(GOLDEN / "golden.npz")["ids"])
    return tmp_path / "ids.npy"


def test_the_logits_of_a_checkpoint_agree_with_an_independent_implementation(ids: Path, tmp_path: Path):
    done = logits(GOLDEN, "--ids", ids, "--out", tmp_path / "logits")
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "logits")
    assert (found.shape, found.dtype) == ((150, 512), np.float32)
    difference = np.abs(found - np.load(GOLDEN / "golden.npz")["logits"]).max(-1)
    assert np.median(difference) <= 1e-5
    assert np.mean(difference <= 1e-3) >= 0.9


def test_keep_gives_the_last_rows_and_the_window_hides_nothing_from_the_first_of_a_longer_tail(
    ids: Path, tmp_path: Path
):
    short, long = tmp_path / "short.npy", tmp_path / "long.npy"
    assert logits(GOLDEN, "--ids", ids, "--out", short, "--keep", 16).returncode == 0
    assert logits(GOLDEN, "--ids", ids, "--out", long, "--keep", 150).returncode == 0
    assert np.load(short).shape == (16, 512)
    assert np.load(long).shape == (150, 512)
    assert not np.array_equal(np.load(short)[-1], np.load(long)[-1])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"keep": 3}, "at least the window of 16 rows"),
        ({"ids": np.array([], np.int64)}, "at least one token"),
        ({"ids": np.array([[3, 4]])}, "one row of whole numbers"),
        ({"ids": np.array([3.5])}, "one row of whole numbers"),
        ({"ids": np.array([3, -1])}, "no token ids: -1 to 3"),
        ({"ids": np.array([3, 512])}, "token 512 is outside the vocabulary of 512"),
        ({"ids": np.full(1025, 5)}, "1025"),
        ({"ids": "missing.npy"}, "cannot read token ids"),
        ({"out": "nowhere/logits.npy"}, "is no directory"),
        ({"checkpoint": "."}, "config.json"),
    ],
)
def test_what_is_wrong_is_one_clear_line(change: dict[str, Any], complaint: str, ids: Path, tmp_path: Path):
    wanted = change.get("ids", ids)
    if isinstance(wanted, np.ndarray):
        np.save(tmp_path / "wrong.npy", wanted)
        wanted = tmp_path / "wrong.npy"
    checkpoint = tmp_path if "checkpoint" in change else GOLDEN
    keep = ["--keep", change["keep"]] if "keep" in change else []
    done = logits(checkpoint, "--ids", wanted, "--out", tmp_path / change.get("out", "logits.npy"), *keep)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "logits.npy").exists()
