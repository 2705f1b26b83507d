from __future__ import annotations

from kv.layout import Kind
from stages.engine.torch.config import TorchConfig
from stages.engine.torch.kv_layout import layout_of
from tests.stages.engine.torch.test_config import config


def test_the_released_model_has_the_published_sizes():
    """Source: facts-model 7.1: 890 bytes a token, blocks of 114,048 bytes, window rows of 528."""
    layout = layout_of(TorchConfig.from_json(config()))
    assert layout.payload_bytes == 890 * 128
    assert layout.block_bytes == 114_048
    assert layout.offset("layer2.main") == 4352
    assert layout.offset("layer8.index") == 4352 + 18432
    assert layout.component("layer20.index").num_bytes == 8704
    assert layout.component("layer20.main").num_bytes == 36864
    ring = layout.component("layer39.swa")
    assert (ring.entries, ring.entry_bytes) == (140, 528)


def test_only_encoder_rings_are_stored():
    layout = layout_of(TorchConfig.from_json(config()))
    stored = [c.name for c in layout.components if c.stored and c.kind is not Kind.PAGED]
    assert stored == [f"layer{i}.swa" for i in range(20)]
    assert layout.stored_state_bytes == 20 * 140 * 528
