from __future__ import annotations

import pytest

from pipeline.topology import Topology
from tidemill.errors import ConfigError
from tidemill.worker import check_stages

TOPOLOGY = Topology.load()


@pytest.mark.parametrize(
    ("asked", "run"),
    [
        (["lookup"], ["lookup"]),
        (["prefill"], ["prefill"]),
        (["codec"], ["codec", "parse"]),
        (["decode"], ["decode", "transfer"]),
        (["transfer"], ["transfer", "decode"]),
        (["codec", "parse", "codec"], ["codec", "parse"]),
        (["lookup", "codec"], ["lookup", "codec", "parse"]),
    ],
)
def test_a_stage_brings_its_companions_and_each_runs_once(asked: list[str], run: list[str]):
    assert check_stages(asked, TOPOLOGY) == run


def test_an_unknown_stage_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"no stage 'lockup'; topics\.yaml has codec, lookup, prefill"):
        check_stages(["codec", "lockup"], TOPOLOGY)


def test_a_worker_without_a_stage_is_refused():
    with pytest.raises(ConfigError, match="at least one stage"):
        check_stages([], TOPOLOGY)


@pytest.mark.parametrize("asked", [["prefill", "decode"], ["prefill", "transfer"], ["decode", "lookup", "prefill"]])
def test_two_engines_never_share_a_process(asked: list[str]):
    with pytest.raises(ConfigError, match="prefill and decode are separate processes"):
        check_stages(asked, TOPOLOGY)
