"""Names of errors, and what each means to HTTP."""

from __future__ import annotations

import pytest

from pipeline.errors import HTTP_STATUS, ErrorCode, RequestError, SetupError, TidemillError, TransientError


def test_every_name_has_an_http_status():
    assert set(HTTP_STATUS) == set(ErrorCode)
    assert all(400 <= status < 600 for status in HTTP_STATUS.values())


def test_the_closed_list_is_the_protocols():
    assert set(ErrorCode) == {
        "invalid_request", "unauthorized", "model_not_found", "payload_too_large", "overloaded", "deadline_exceeded",
        "worker_lost", "stream_lost", "internal",
    }  # fmt: skip


def test_a_request_error_carries_what_the_subscriber_is_told():
    error = RequestError(ErrorCode.INVALID_REQUEST, "no such field", param="n")
    assert (error.code, error.message, error.param, str(error)) == (
        "invalid_request", "no such field", "n", "no such field",
    )  # fmt: skip
    assert RequestError(ErrorCode.INTERNAL, "x").param is None


@pytest.mark.parametrize("kind", [TransientError, SetupError, lambda text: RequestError(ErrorCode.INTERNAL, text)])
def test_all_of_ours_have_one_base(kind):
    assert isinstance(kind("x"), TidemillError)
    assert str(kind("x")) == "x"
