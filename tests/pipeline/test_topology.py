import dataclasses

import pytest

from pipeline.topology import DEFAULT_PATH, Delivery, Limits, Shape, Topology, TopologyError, read

TEXT = DEFAULT_PATH.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def topology():
    return Topology.load()


def faults_of(tmp_path, old, new):
    """What loading says after one replacement in topics.yaml."""
    assert TEXT.count(old) == 1, old
    path = tmp_path / "topics.yaml"
    path.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(TopologyError) as error:
        Topology.load(path)
    return error.value.faults


def line_of(text, part):
    return text[: text.index(part)].count("\n") + 1


def test_every_record_of_the_file_becomes_an_object(topology):
    intake = topology.topics["intake"]
    assert (intake.name, intake.delivery, intake.stream) == ("intake", Delivery.WORK_QUEUE, "INTAKE")
    assert (intake.sources, intake.targets) == (("publisher",), ("codec",))
    codec = topology.stages["codec"]
    assert (codec.shape, codec.inputs, codec.outputs) == (Shape.REQUEST, ("intake",), ("encoded",))
    assert codec.companions == ("parse",)
    assert topology.streams["FENCE"].max_msgs == 1
    assert topology.consumers["codec_batch"].ack_wait_s == 4.0
    assert list(topology.stages) == ["codec", "lookup", "prefill", "transfer", "decode", "parse"]


def test_limits_are_typed_by_their_field_and_not_by_how_they_are_written(topology):
    limits = topology.limits
    assert isinstance(limits.max_timeout_s, float), "3600 in the file"
    assert isinstance(limits.accept_tries, int)
    assert {type(getattr(limits, item.name)).__name__ for item in dataclasses.fields(limits)} == {"int", "float"}
    for item in dataclasses.fields(Limits):
        assert item.type == type(getattr(limits, item.name)).__name__, item.name


def test_nothing_of_a_topology_can_be_changed(topology):
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.limits.accept_tries = 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.topics["intake"].subject = "elsewhere"


def test_subjects_are_filled_in_and_read_back(topology):
    subject = topology.subject("intake", request_class="batch", tenant="team_1-a")
    assert subject == "v1.in.batch.team_1-a"
    assert topology.subject("intake", tenant="team_1-a", request_class="batch") == subject
    assert topology.params("intake", subject) == {"request_class": "batch", "tenant": "team_1-a"}
    assert topology.subject("encoded") == "v1.lookup"
    assert topology.group("encoded") == "lookup"
    assert topology.group("intake") == ""


def test_two_parameters_that_trade_values_give_two_subjects(topology):
    one = topology.subject("events", tenant="x", connection="y")
    other = topology.subject("events", connection="x", tenant="y")
    assert (one, other) == ("v1.out.x.y", "v1.out.y.x")


def test_a_worker_is_addressed_by_name_in_queues_and_direct_topics(topology):
    assert topology.named("encoded", "w7") == "v1.lookup.w7"
    assert topology.named("control", "w7") == topology.subject("control", worker="w7") == "v1.ctl.w7"
    for name in ("intake", "events", "everyone", "transferred"):
        with pytest.raises(TopologyError, match=f"'{name}' does not address a worker"):
            topology.named(name, "w7")


def test_patterns_leave_what_is_not_given_open(topology):
    assert topology.pattern("intake") == "v1.in.*.*"
    assert topology.pattern("intake", tenant="t9") == "v1.in.*.t9"
    assert topology.pattern("encoded") == "v1.lookup"
    assert topology.pattern("blob", rid="ab", part="0") == "v1.blob.*.ab.0"


@pytest.mark.parametrize("value", ["", "a.b", "*", ">", "a b", "a\r\nPUB x 0", "ü", "a\n", None, 7])
def test_a_value_that_is_no_token_is_refused_with_topic_and_parameter(topology, value):
    for use in (topology.subject, topology.pattern):
        with pytest.raises(TopologyError, match=r"'intake'.*'tenant'"):
            use("intake", request_class="batch", tenant=value)
    with pytest.raises(TopologyError, match=r"'control'.*'worker'"):
        topology.named("control", value)


def test_wrong_uses_name_what_is_wrong(topology):
    with pytest.raises(TopologyError, match="no topic 'intakes'"):
        topology.subject("intakes")
    with pytest.raises(TopologyError, match=r"'intake'.*'tenant' is missing"):
        topology.subject("intake", request_class="batch")
    with pytest.raises(TopologyError, match="'intake' has no parameter 'rid'"):
        topology.subject("intake", request_class="batch", tenant="t", rid="r")
    with pytest.raises(TopologyError, match="'transferred' is local"):
        topology.pattern("transferred")
    for subject in ("v1.in.batch", "v1.out.batch.t", "v1.in.batch.t.u", "v1.in.*.t"):
        with pytest.raises(TopologyError, match="'intake'"):
            topology.params("intake", subject)


def test_the_cache_of_subjects_is_bounded_and_changes_no_answer(topology):
    for number in range(10_000):
        assert topology.named("control", f"w{number}") == f"v1.ctl.w{number}"
    assert len(topology._filled) <= 4_096
    assert topology.named("control", "w1") == "v1.ctl.w1"


def test_a_key_given_twice_is_a_fault_with_both_lines(tmp_path):
    faults = faults_of(tmp_path, "  lease_s: 30 ", "  lease_s: 30\n  lease_s: 31 ")
    first = line_of(TEXT, "  lease_s: 30 ")
    assert faults == (f"line {first + 1}: key 'lease_s' given twice, first in line {first}",)


def test_a_topic_given_twice_is_a_fault(tmp_path):
    again = '  fence: {subject: "v1.again", delivery: direct, event: Fence, from: [codec], to: [codec]}\n\nstreams:'
    (fault,) = faults_of(tmp_path, "\nstreams:", f"{again}")
    assert "key 'fence' given twice" in fault


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("drain_s: 30", "drain_s: soon", "limits: 'drain_s' is 'soon', not a number"),
        ("drain_s: 30", "drain_s: true", "limits: 'drain_s' is True, not a number"),
        ("drain_s: 30", "drain_s: .nan", "limits: 'drain_s' is nan, not a number"),
        ("accept_tries: 3", "accept_tries: 3.5", "limits: 'accept_tries' is 3.5, not a whole number"),
        ("accept_tries: 3", "accept_tries: true", "limits: 'accept_tries' is True, not a whole number"),
        ("drain_s: 30", "drains_s: 30", "limits: unknown key 'drains_s'"),
        ("drain_s: 30", "drains_s: 30", "limits: key 'drain_s' is missing"),
        ("shape: stream,", "shape: river,", "stages.parse: 'shape' is 'river', not one of request, engine, stream"),
        ("out: [matched]", "out: matched", "stages.lookup: 'out' is 'matched', not a list"),
        ("out: [matched]", "out: [7]", "stages.lookup: 'out' is 7, not text"),
        ("direct: true", 'direct: "yes"', "streams.BLOB: 'direct' is 'yes', not true or false"),
        ("delivery: reply", "delivery: reply, retries: 3", "topics.events: unknown key 'retries'"),
        ("delivery: reply, ", "", "topics.events: key 'delivery' is missing"),
        ("delivery: reply", "delivery: reply, name: x", "topics.events: unknown key 'name'"),
        ("  beacon_s:", "  7: 1\n  beacon_s:", "key 7 is not a string"),
        ("version: 1", "version: 2", "version: is 2, this program reads 1"),
        ("version: 1", "version: 1\nextras: {}", "extras: unknown section"),
        ("version: 1", "version: 1\nlast: [", "not YAML"),
    ],
)
def test_a_fault_of_form_is_named_with_its_line(tmp_path, old, new, expected):
    faults = faults_of(tmp_path, old, new)
    assert any(fault.endswith(expected) or expected in fault for fault in faults), faults
    if "not YAML" not in expected:
        assert all(fault.startswith("line ") for fault in faults)


def test_all_faults_come_in_one_message(tmp_path):
    text = TEXT.replace("drain_s: 30", "drain_s: soon").replace("shape: stream,", "shape: river,")
    path = tmp_path / "topics.yaml"
    path.write_text(text.replace("version: 1", "version: 9"), encoding="utf-8")
    with pytest.raises(TopologyError) as error:
        Topology.load(path)
    assert len(error.value.faults) == 3
    assert str(error.value).count("\n") == 2


@pytest.mark.parametrize(
    "text", ["", "[]", "just words", "limits: 3\ntopics: []", "\x00", "a: &x [*x]", "!!python/object:os.x {}"]
)
def test_rubbish_is_read_into_faults(text):
    reading = read(text)
    assert reading.faults
    assert reading.topology.topics == {}


def test_a_file_that_cannot_be_read_is_a_named_error(tmp_path):
    with pytest.raises(TopologyError, match=r"nowhere\.yaml cannot be read"):
        Topology.load(tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(TopologyError, match=r"latin\.yaml cannot be read"):
        Topology.load(tmp_path / "latin.yaml")
