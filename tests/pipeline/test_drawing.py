import pytest

from pipeline.drawing import OWNER_MARKER, block, embed, graph, owner_block, owner_graph, stale, table
from pipeline.owner import TABLE, State
from pipeline.topology import DEFAULT_PATH, Topology, TopologyError, read

TEXT = DEFAULT_PATH.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def topology():
    return Topology.load()


def test_the_graph_shows_the_requests_way_and_how_each_event_travels(topology):
    drawn = graph(topology)
    assert drawn.startswith("flowchart LR\n")
    for arrow in (
        'publisher -->|"RequestBody<br>work queue INTAKE"| codec',
        'codec -->|"PromptEncoded<br>queue lookup"| lookup',
        'lookup -->|"PrefixMatched<br>direct"| prefill',
        'prefill -->|"PrefillFinished<br>direct"| transfer',
        'transfer -->|"VerifiedSequence<br>local"| decode',
        'prefill -->|"TokensDecoded<br>direct"| parse',
        'decode -->|"TokensDecoded<br>direct"| parse',
        'parse -->|"StreamEvent<br>reply"| subscriber',
    ):
        assert f"    {arrow}\n" in drawn
    assert drawn.count("-->") == 8, "what steers is in the table only"


def test_stages_that_run_together_share_a_box(topology):
    lines = graph(topology).splitlines()
    for first, second in (("codec", "parse"), ("transfer", "decode")):
        start = lines.index(f'    subgraph {first}_{second}["one process: {first} + {second}"]')
        assert lines[start + 1 : start + 4] == [
            f'        {first}["{first}"]',
            f'        {second}["{second}"]',
            "    end",
        ]
    assert '    lookup["lookup"]' in lines
    for stage in topology.stages:
        assert sum(line.strip() == f'{stage}["{stage}"]' for line in lines) == 1


def test_companions_of_companions_share_the_box_too():
    text = TEXT.replace("out: [matched]}", "out: [matched], with: [parse]}")
    assert 'subgraph codec_lookup_parse["one process: codec + lookup + parse"]' in graph(read(text).topology)


def test_the_table_lists_every_topic_in_the_order_of_the_file(topology):
    rows = table(topology).splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(topology.topics)
    assert "| encoded | `v1.lookup`<br>`v1.lookup.{worker}` | queue lookup | PromptEncoded | codec | lookup |" in rows
    assert all(row.count("|") == 7 for row in rows)


def test_the_same_topics_give_the_same_drawing(topology):
    assert block(topology) == block(Topology.load())


def test_embedding_replaces_only_what_is_between_the_markers():
    text = "before\n<!-- topology:begin -->\nold\n<!-- topology:end -->\nafter\n"
    embedded = embed(text, "topology", "new\nlines\n")
    assert embedded == "before\n<!-- topology:begin -->\nnew\nlines\n<!-- topology:end -->\nafter\n"
    assert embed(embedded, "topology", "new\nlines") == embedded


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- topology:begin -->",
        "<!-- topology:end --> <!-- topology:begin -->",
        "<!-- topology:begin --><!-- topology:begin --><!-- topology:end -->",
    ],
)
def test_a_text_without_proper_markers_is_refused(text, topology):
    with pytest.raises(TopologyError, match="topology:begin"):
        embed(text, "topology", "new")
    with pytest.raises(TopologyError, match="topology:begin"):
        stale(text, topology)


def test_a_drawing_is_stale_when_the_topics_changed(topology):
    fresh = embed("<!-- topology:begin --><!-- topology:end -->", "topology", block(topology))
    assert not stale(fresh, topology)
    assert stale(fresh, read(TEXT.replace("delivery: queue", "delivery: direct")).topology)
    assert stale(fresh, read(TEXT.replace("v1.ack.", "v1.acks.")).topology)


def test_the_readme_shows_the_topics_as_they_are(topology):
    readme = (DEFAULT_PATH.parent / "README.md").read_text(encoding="utf-8")
    assert not stale(readme, topology), "refresh it with pipeline.drawing.embed"


def test_the_owners_graph_shows_every_state_and_how_each_may_end():
    drawn = owner_graph()
    for arrow in (
        "new --> encoding : Started",
        "transfer --> decode : Accepted, KVTransferred",
        "finding --> fencing : find timer",
        "live --> ending : Refused, CancelAsked, deadline timer",
        "ending --> ended : Superseded, Delivered, deadline timer",
    ):
        assert f" {arrow}\n" in drawn
    assert all(f" {state} --> " in drawn for state in State)
    assert not [line for line in drawn.splitlines() if " --> " in line and line.split()[0] == line.split()[2]]


def test_every_edge_of_the_owners_table_is_in_its_graph_or_in_a_boxs():
    drawn = {
        (line.split()[0], line.split()[2], word)
        for line in owner_graph().splitlines()
        if " : " in line
        for word in line.partition(" : ")[2].split(", ")
    }
    for (at, signal), row in TABLE.items():
        for to in row.leads_to:
            ways = {(from_, str(to), signal.__name__) for from_ in (str(at), "running", "live")}
            assert at is to or signal.__name__ == "TimedOut" or ways & drawn, (at, signal, to)


def test_the_protocol_shows_the_owners_table_as_it_is():
    text = (DEFAULT_PATH.parent / "docs/protocol.md").read_text(encoding="utf-8")
    assert embed(text, OWNER_MARKER, owner_block()) == text, "refresh it with pipeline.drawing.embed"
