"""Errors sorted by who must act: the caller, the environment, or us.

Anything that is neither a RequestError nor a TransientError is a bug: it is logged, fails one request with
`internal`, and the worker lives on.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The closed list of names a failed request may end with."""

    INVALID_REQUEST = "invalid_request"
    UNAUTHORIZED = "unauthorized"
    MODEL_NOT_FOUND = "model_not_found"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    WORKER_LOST = "worker_lost"
    STREAM_LOST = "stream_lost"
    INTERNAL = "internal"


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.PAYLOAD_TOO_LARGE: 413,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.WORKER_LOST: 502,
    ErrorCode.STREAM_LOST: 502,
    ErrorCode.INTERNAL: 500,
}


class TidemillError(Exception):
    """Base of every error that tidemill itself raises."""


class RequestError(TidemillError):
    """The caller must change the request. Carries the code that the subscriber is told."""

    def __init__(self, code: ErrorCode, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class TransientError(TidemillError):
    """The environment failed: another worker, or a little later, may do."""


class SetupError(TidemillError):
    """The surroundings cannot carry the pipeline (no JetStream, no permission, limits too low). Not retried."""
