"""KV bytes: their layout, keys, pool, plan and index; regions, links and the handoff from prefill to decode."""
