"""One codec for all tests of the package: loading takes a quarter of a second."""

from __future__ import annotations

import pytest
from hypothesis import settings

from codec.codec import Codec
from codec.vocab import Vocabulary, load_vocabulary

settings.register_profile("codec", deadline=None)  # a busy machine is no fault
settings.load_profile("codec")


@pytest.fixture(scope="session")
def codec() -> Codec:
    return Codec.load({"tern-1": "DeepSeek-V4.1-Flash", "tern-pro": "DeepSeek-V4-Pro"})


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return load_vocabulary()
