import pytest

from pipeline.delivery import Subscriber
from pipeline.errors import ErrorCode, RequestError
from pipeline.jetstream import parse_ack
from pipeline.owner import Owner, OwnerLimits
from pipeline.request import Request, check_reply, read_head
from pipeline.topology import Topology

LIMITS = Topology.load().limits
RID = "c0ffee00c0ffee01c0ffee02c0ffee03"
OUT = "v1.out."
SUBJECT = "v1.in.interactive.acme"
REPLY = "_INBOX.k3.7"


def headers(**changes: str | None) -> dict[str, str]:
    """A good message's headers with some of them (`_` for `-`) changed or left out."""
    fields = {"Nats-Msg-Id": f"acme:{RID}"} | {name.replace("_", "-"): value for name, value in changes.items()}
    return {name: value for name, value in fields.items() if value is not None}


def read(subject: str = SUBJECT, **changes: str | None):
    return read_head(subject, headers(**changes), REPLY, LIMITS)


@pytest.mark.parametrize("reply", ["_INBOX.x", "_INBOX.a.b.c", "v1.out.acme.c1", "v1.out.acme.c1.deep", "_INBOX.$x!~"])
def test_a_reply_below_an_inbox_or_the_tenants_own_space_is_taken(reply):
    assert check_reply(reply, "acme", OUT) == reply


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "_INBOX",
        "_INBOX.",
        "_INBOX.a.",
        "_INBOX..a",
        "_inbox.a",
        "_INBOX.*",
        "_INBOX.>",
        "_INBOX.a*b",
        "_INBOX.a b",
        "_INBOX.a\tb",
        "_INBOX.a\r\nPUB v1.ctl 2\r\nhi",
        "_INBOX.a\n",
        "_INBOX.a\x00",
        "_INBOX.ä",
        "_INBOX." + "x" * 249,
        "_INBOXES.a",
        " _INBOX.a",
        "v1.out.acme",
        "v1.out.acme.",
        "v1.out.other.c1",
        "v1.out.acme2.c1",
        "v1.out.*.c1",
        "v1.out.>",
        "v1.ctl",
        "v1.ctl.codec-1",
        "v1.in.interactive.acme",
        "v1.fence",
        "$JS.API.STREAM.DELETE.INTAKE",
        "$JS.ACK.INTAKE.codec.1.2.3.4.5",
        "$SYS.REQ.SERVER.PING",
        ">",
    ],
)
def test_any_other_reply_is_refused(reply):
    with pytest.raises(RequestError) as caught:
        check_reply(reply, "acme", OUT)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "Tm-Reply")
    assert len(caught.value.message) < 500


def test_headers_that_are_not_given_have_defaults():
    head = read()
    assert (head.rid, head.tenant, head.request_class, head.reply) == (RID, "acme", "interactive", REPLY)
    assert (head.protocol, head.timeout_s) == ("chat_completions", LIMITS.default_timeout_s)
    assert (head.tag, head.blob, head.timeline) == (-1, "", False)


def test_headers_that_are_given_count():
    head = read(
        "v1.in.batch.acme", Tm_Protocol="messages", Tm_Timeout="12.5", Tm_Batch="18446744073709551615",
        Tm_Blob="body;3;700000;00ff", Tm_Timeline="1",
    )  # fmt: skip
    assert (head.request_class, head.protocol, head.timeout_s) == ("batch", "messages", 12.5)
    assert (head.tag, head.blob, head.timeline) == (2**64 - 1, "body;3;700000;00ff", True)


@pytest.mark.parametrize(
    "message_id",
    [
        None,
        "",
        RID,
        f"other:{RID}",
        f"acme:{RID[:-1]}",
        f"acme:{RID}0",
        f"acme:{RID.upper()}",
        f"acme:{RID}\n",
        f"acme:acme:{RID}",
        f"acme: {RID}",
        "acme:" + "g" * 32,
        "acme:" + "٣" * 32,
    ],
)
def test_a_message_id_must_be_the_tenant_and_32_hex_digits(message_id):
    with pytest.raises(RequestError, match="Nats-Msg-Id must be acme:") as caught:
        read(Nats_Msg_Id=message_id)
    assert caught.value.param == "Nats-Msg-Id"


@pytest.mark.parametrize("timeout", ["0.001", "1", "1e3", "3600", "+5", "3600.0"])
def test_a_timeout_within_the_limit_is_taken(timeout):
    assert read(Tm_Timeout=timeout).timeout_s == float(timeout)


@pytest.mark.parametrize(
    "timeout",
    [
        "",
        "0",
        "-0.0",
        "-1",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "3600.001",
        "1e9",
        "ten",
        "1_0",
        " 5",
        "5 ",
        "0x10",
        "٣",
        "9" * 400,
    ],
)
def test_any_other_timeout_is_refused(timeout):
    with pytest.raises(RequestError) as caught:
        read(Tm_Timeout=timeout)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "Tm-Timeout")
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("tag", ["", "-1", "+1", "1.0", "0x1", "18446744073709551616", "²", "1 ", "9" * 5_000])
def test_a_batch_tag_is_an_unsigned_64_bit_number(tag):
    with pytest.raises(RequestError) as caught:
        read(Tm_Batch=tag)
    assert caught.value.param == "Tm-Batch"


@pytest.mark.parametrize("protocol", ["", "Chat_Completions", "grpc", "x" * 10_000])
def test_an_unknown_protocol_is_refused_with_the_known_ones(protocol):
    with pytest.raises(RequestError, match="not one of chat_completions, responses, messages, completions") as caught:
        read(Tm_Protocol=protocol)
    assert caught.value.param == "Tm-Protocol"
    assert len(caught.value.message) < 200


def test_an_unknown_class_is_refused():
    with pytest.raises(RequestError, match="unknown class 'urgent'"):
        read("v1.in.urgent.acme")


def test_the_deadline_is_the_brokers_clock_plus_the_timeout():
    delivery = parse_ack("$JS.ACK.INTAKE.codec_interactive.2.815.4711.1790000000000000123.9")
    machine = Owner(RID, OwnerLimits(**dict.fromkeys(_OWNER_LIMITS, 1)), 30.0)
    subscriber = Subscriber(lambda *_: True, REPLY, "v1.want.codec-1")
    request = Request(read(Tm_Timeout="30"), delivery, machine, subscriber, b"{}", started_ns=5)
    assert (delivery.num_delivered, delivery.stream_seq) == (2, 815)
    assert request.deadline_ns == 1_790_000_030_000_000_123
    assert request.created == 1_790_000_000
    assert request.rid == RID


_OWNER_LIMITS = (
    "accept_timeout_s",
    "accept_tries",
    "retry_pause_s",
    "find_timeout_s",
    "stage_timeout_s",
    "progress_s",
    "max_attempts",
)


def test_the_newer_form_of_an_ack_subject_is_read_too():
    delivery = parse_ack("$JS.ACK.hub.ACCHASH.INTAKE.codec_batch.3.816.4712.1790000000000000456.8.rnd")
    assert (delivery.num_delivered, delivery.stream_seq, delivery.time_ns) == (3, 816, 1_790_000_000_000_000_456)


@pytest.mark.parametrize("subject", ["", "$JS.ACK", "_INBOX.a.b.c.d.e.f.g.h", "$JS.ACK.S.C.x.1.2.3.4"])
def test_what_is_no_ack_subject_is_refused(subject):
    with pytest.raises(ValueError, match=r"not a JetStream ack subject|invalid literal"):
        parse_ack(subject)
