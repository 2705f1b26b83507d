"""The three shapes of a stage: what tests and the real stages implement is what the fabric calls."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

from pipeline.events import Beacon, Outcome
from pipeline.stage import Answer, CodecStage, EngineLoad, EngineStage, Held, RequestStage
from pipeline.topology import Shape, Topology
from tests.pipeline.fabric import EchoCodec, SmallEngine

STAGES = Topology.load().stages


def methods_of(shape: type) -> dict[str, list[str]]:
    """Name -> parameters."""
    return {
        name: list(inspect.signature(member).parameters)
        for name, member in inspect.getmembers(shape, inspect.isfunction)
        if not name.startswith("_")
    }


def check(stage: type, shape: type) -> None:
    for name, parameters in methods_of(shape).items():
        assert hasattr(stage, name), f"{stage.__name__} has no {name}"
        assert list(inspect.signature(getattr(stage, name)).parameters) == parameters, f"{stage.__name__}.{name}"


def test_the_small_stages_of_these_tests_have_the_shapes_of_real_ones():
    check(EchoCodec, CodecStage)
    check(EchoCodec, RequestStage)
    check(SmallEngine, EngineStage)


@pytest.mark.parametrize("name", [name for name, spec in STAGES.items() if spec.shape is Shape.REQUEST])
def test_a_real_request_stage_has_its_shape(name: str):
    check(code_of(name), CodecStage if name == "codec" else RequestStage)


@pytest.mark.parametrize("name", ["prefill", "transfer"])
def test_a_real_engine_stage_has_its_shape(name: str):
    """In a decode process it is transfer that takes work, for both."""
    check(code_of(name), EngineStage)


def code_of(name: str) -> Any:
    module, attribute = STAGES[name].code.split(":")
    return getattr(importlib.import_module(module), attribute)


def test_whatever_an_engine_reports_has_its_place_in_the_beacon():
    assert {field.name for field in dataclasses.fields(EngineLoad)} <= set(Beacon.__struct_fields__)


@pytest.mark.parametrize("value", [Answer(Outcome.BUSY), Held("r", 0, "prefill", "owner")])
def test_what_a_stage_answers_cannot_be_changed(value: Any):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, "other")
