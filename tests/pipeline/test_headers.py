import pytest

from pipeline.headers import HeaderError, format_headers, parse_headers


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, (None, "", {})),
        (b"", (None, "", {})),
        (b"NATS/1.0\r\n\r\n", (None, "", {})),
        (b"NATS/1.0 503\r\n\r\n", (503, "", {})),
        (b"NATS/1.0 404 No Messages\r\n\r\n", (404, "No Messages", {})),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1016\r\nNats-Last-Stream: 1024\r\n\r\n",
            (100, "Idle Heartbeat", {"Nats-Last-Consumer": "1016", "Nats-Last-Stream": "1024"}),
        ),
        (
            b"NATS/1.0\r\nTm-Timeout: 30\r\nNoBlank:x\r\nTm-Note: a: b\r\n\r\n",
            (None, "", {"Tm-Timeout": "30", "NoBlank": "x", "Tm-Note": "a: b"}),
        ),
        ("NATS/1.0\r\nTm-Name: Grüße\r\n\r\n".encode(), (None, "", {"Tm-Name": "Grüße"})),
        (b"NATS/1.0\r\nA: first\r\nA: last\r\n\r\n", (None, "", {"A": "last"})),
        (b"NATS/1.0\r\na line without its colon\r\nB: 2\r\n\r\n", (None, "", {"B": "2"})),
    ],
)
def test_headers_are_parsed_into_status_description_and_fields(raw, expected):
    assert parse_headers(raw) == expected


@pytest.mark.parametrize(
    "raw", [b"HTTP/1.1 200 OK\r\n\r\n", b"NATS/1.0 abc\r\n\r\n", b"\xff\xfe", b"NATS/1.0 9999\r\n\r\n"]
)
def test_bytes_that_are_no_headers_are_refused(raw):
    with pytest.raises(HeaderError):
        parse_headers(raw)


def test_what_is_formatted_is_parsed_back():
    fields = {"Nats-Msg-Id": "default:00ff", "Tm-Note": "Grüße: viele"}
    assert parse_headers(format_headers(fields)) == (None, "", fields)
    assert parse_headers(format_headers(fields, 503)) == (503, "", fields)
    assert parse_headers(format_headers({}, 404, "No Messages")) == (404, "No Messages", {})


@pytest.mark.parametrize("fields", [{"A b": "1"}, {"": "2"}, {"A:": "3"}, {"A": "4\r\nB: 5"}, {"A": "6\nB"}])
def test_a_header_that_would_break_the_protocol_is_refused(fields):
    with pytest.raises(HeaderError):
        format_headers(fields)
