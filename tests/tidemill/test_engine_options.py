from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.engine_options import EngineOptions
from tidemill.errors import ConfigError


def test_without_options_an_engine_has_its_own_sizes_and_verifies():
    assert EngineOptions.parse({}) == EngineOptions()
    assert (EngineOptions().kv_blocks, EngineOptions().threads, EngineOptions().verify) == (0, 1, True)


def test_every_option_is_read_as_its_own_type():
    options = EngineOptions.parse(
        {
            "kv_blocks": "128",
            "states": "9",
            "threads": "2",
            "model_dir": "/models/tiny",
            "kv_secret": "7",
            "verify": "False",
            "stub_step_s": "0.004",
            "stub_prefill_tokens_per_s": "1e6",
            "stub_max_context_tokens": "4096",
            "stub_flip_blocks": "1",
        }
    )
    assert options == EngineOptions(
        kv_blocks=128,
        states=9,
        threads=2,
        model_dir=Path("/models/tiny"),
        kv_secret="7",
        verify=False,
        stub_step_s=0.004,
        stub_prefill_tokens_per_s=1e6,
        stub_max_context_tokens=4096,
        stub_flip_blocks=1,
    )


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("FALSE", False), ("0", False)])
def test_a_switch_is_said_in_four_ways(text: str, value: bool):
    assert EngineOptions.parse({"verify": text}).verify is value


def test_an_unknown_option_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"unknown option 'kv_block'; known: exact, kv_blocks, .*verify"):
        EngineOptions.parse({"kv_block": "128"})


@pytest.mark.parametrize(
    ("key", "text", "kind"),
    [("kv_blocks", "1.5", "int"), ("stub_step_s", "soon", "float"), ("verify", "yes", "bool"), ("states", "", "int")],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(key: str, text: str, kind: str):
    with pytest.raises(ConfigError, match=f"option {key}='{text}' is not a {kind}"):
        EngineOptions.parse({key: text})
