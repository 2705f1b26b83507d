"""What a person at the command line has to fix: shown as one message, without a traceback."""

from __future__ import annotations

from typing import ClassVar


class CommandError(RuntimeError):
    """A command cannot do what it was asked to. The message says what is wrong and what to do about it."""

    exit_code: ClassVar[int] = 1


class ConfigError(CommandError):
    """A process can never run as configured (no JetStream, no permission, a bad option): restarting it is no help."""

    exit_code: ClassVar[int] = 78  # EX_CONFIG of <sysexits.h>; a supervisor that sees it stops instead of restarting
