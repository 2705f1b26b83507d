"""Errors that the caller of a request must act on, and the OpenAI envelope that carries any failure to a client."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


def error_type(status: int) -> str:
    """The OpenAI `error.type` of an HTTP status: clients choose by it whether to retry."""
    if status in {401, 403}:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_body(
    code: str, message: str, status: int, param: str | None = None, extra: Mapping[str, object] | None = None
) -> bytes:
    """A failure as the JSON object that OpenAI clients read.

    `extra` adds members beside the four usual ones (such as `retry_after_s`); it must be JSON-serialisable.
    """
    error = {"message": message, "type": error_type(status), "param": param, "code": code, **(extra or {})}
    return msgspec.json.encode({"error": error})


class CodecError(Exception):
    """The request cannot be served as it is: only its sender can change that.

    Attributes: `status` (HTTP meaning), `code` (of the protocol's closed list), `message` (names the field where one
    is to blame), `param` (that field's name or path, else None).
    """

    def __init__(self, *, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """The OpenAI error envelope."""
        return error_body(self.code, self.message, self.status, self.param)


class VocabularyError(Exception):
    """The tokenizer's data file is missing or is not the one that was verified: the installation is at fault."""


def invalid_request(message: str, param: str | None = None) -> CodecError:
    """A 400: the body breaks the protocol."""
    return CodecError(status=400, code="invalid_request", message=message, param=param)


def not_served(param: str, wish: str) -> CodecError:
    """A 400: a valid wish which no engine here can fulfil. Dropping it silently would answer another question."""
    return invalid_request(f"{param}: {wish} is not served yet", param)
