"""What `tidemill model ...` does with a checkpoint directory, without any pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidemill.errors import CommandError


def logits(directory: Path, ids_path: Path, out_path: Path, *, keep: int | None, threads: int) -> str:
    """Write the logits of one prefill to `out_path` (.npy, fp32 [rows, vocab_size]); a line that says what was done.

    Raises: CommandError naming what is wrong: the checkpoint, the ids, the file to write.
    """
    import torch  # noqa: PLC0415 - half a second that no other command needs

    from stages.engine.torch.checkpoint import CheckpointError, read_checkpoint  # noqa: PLC0415
    from stages.engine.torch.config import ConfigError  # noqa: PLC0415
    from stages.engine.torch.one_prefill import prefill_logits  # noqa: PLC0415
    from stages.engine.torch.runner import SequenceError  # noqa: PLC0415

    torch.set_num_threads(threads)
    ids = _read_ids(ids_path)
    if not out_path.parent.is_dir():
        raise CommandError(f"{out_path.parent} is no directory")
    try:
        found = prefill_logits(read_checkpoint(directory), ids, keep=keep)
    except (CheckpointError, ConfigError, SequenceError, ValueError) as error:
        raise CommandError(str(error)) from error
    try:
        with out_path.open("wb") as file:  # np.save would add .npy to another name
            np.save(file, found)
    except OSError as error:
        raise CommandError(f"cannot write the logits: {error}") from error
    return f"{out_path}: logits of {found.shape[0]} positions, {found.shape[1]} each"


def _read_ids(path: Path) -> npt.NDArray[np.uint32]:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CommandError(f"cannot read token ids from {path}: {error}") from error
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
        raise CommandError(f"{path} must hold one row of whole numbers, token ids")
    if len(found) and (found.min() < 0 or found.max() >= 1 << 32):
        raise CommandError(f"{path} holds numbers that are no token ids: {found.min()} to {found.max()}")
    ids: npt.NDArray[np.uint32] = found.astype(np.uint32)
    return ids
