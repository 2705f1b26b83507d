"""Children that die with their parent, so that no kill -9 of a supervisor leaves an orphan behind."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec nothing may be loaded


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` after which the kernel sends `sig` to the child when the parent is gone.

    The kernel watches the parent *thread*: start such children from a thread that lives as long as the process (the
    main one), never from an executor. The setting survives exec.
    """
    parent = os.getpid()

    def arm() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
        if os.getppid() != parent:  # it died before we were armed: no signal will come
            os._exit(1)

    return arm
