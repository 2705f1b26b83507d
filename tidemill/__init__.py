"""The launcher: the `tidemill` command, its supervisor and its embedded NATS server.

The only package that a wheel puts into site-packages; the others (pipeline, stages, codec, kv, kernels, loadgen) live
in an app folder beside it, because a name like `kernels` or `kv` belongs to nobody. Whoever imports them from an
installed wheel calls `activate()` first; the command line does.
"""

from __future__ import annotations

import sys
from pathlib import Path

__version__ = "0.1.0"


def _app_dir() -> Path:
    """`_app` inside a wheel, the checkout in an editable install."""
    here = Path(__file__).resolve().parent
    inside = here / "_app"
    return inside if inside.is_dir() else here.parent


def activate() -> None:
    """Make the packages of the app importable, before any foreign package of the same name.

    To the front of `sys.path`, not only onto it: an editable install puts the checkout last, and a `kernels` package of
    someone else would win. Source: facts-spikes 5.
    """
    app = str(_app_dir())
    sys.path[:] = [app, *(path for path in sys.path if path != app)]


def main() -> None:
    """Run the `tidemill` command."""
    activate()
    from tidemill.cli import run  # noqa: PLC0415 - only after activate()

    run()
