"""The fabric: events, wire, bus, owner, membership, workers and the client. Knows nothing of text, KV or models."""
