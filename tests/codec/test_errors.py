from __future__ import annotations

import json

import pytest

from codec.errors import CodecError, error_body, error_type, not_served


def test_an_error_body_is_the_openai_envelope():
    error = CodecError(status=400, code="invalid_request", message='stop: "é" is odd', param="stop")
    assert json.loads(error.body()) == {
        "error": {
            "message": 'stop: "é" is odd',
            "type": "invalid_request_error",
            "param": "stop",
            "code": "invalid_request",
        }
    }
    assert str(error) == 'stop: "é" is odd'


def test_extra_members_stand_beside_the_usual_ones():
    body = json.loads(error_body("overloaded", "try later", 429, extra={"retry_after_s": 1.5}))
    assert body["error"]["retry_after_s"] == 1.5
    assert body["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_the_type_tells_a_client_whether_to_retry(status: int, kind: str):
    assert error_type(status) == kind


def test_a_wish_that_nothing_fulfils_names_itself():
    error = not_served("n", "2")
    assert (error.status, error.param) == (400, "n")
    assert "n: 2 is not served yet" in str(error)
