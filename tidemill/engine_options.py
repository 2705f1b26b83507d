"""Settings of an engine worker, as `--option KEY=VALUE` texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tidemill.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How big and how an engine runs. Sizes of 0 mean "the engine's own default".

    kv_blocks: of 128 tokens. states: requests in hand at once. kv_secret: keys the salt of block keys; every codec
    worker of a cluster needs the same. verify: checksums of transferred KV (off only to show why they are on). exact:
    results do not depend on batch, chunk or worker; off is faster (python -m bench.engine shows by how much). threads:
    more than 1 gives up that the last bits of results are equal between runs, and with them the same tokens for a seed.
    """

    kv_blocks: int = 0
    states: int = 0
    exact: bool = True
    threads: int = 1  # facts-spikes 7.1: two threads win nothing on two cores and collapse beside a busy neighbour
    model_dir: Path | None = None
    kv_secret: str = ""
    verify: bool = True
    stub_step_s: float = 0.0
    stub_prefill_tokens_per_s: float = 0.0
    stub_max_context_tokens: int = 1 << 20
    stub_flip_blocks: int = 0

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> EngineOptions:
        """Raises: ConfigError naming an unknown key or a value of the wrong type."""
        known = {field.name: field for field in fields(cls)}
        values: dict[str, object] = {}
        for key, text in texts.items():
            if key not in known:
                raise ConfigError(f"unknown option {key!r}; known: {', '.join(sorted(known))}")
            values[key] = _value(key, text, str(known[key].type))
        return cls(**values)  # type: ignore[arg-type]  # _value gave each field its own type


def _value(key: str, text: str, kind: str) -> object:
    try:
        match kind:
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            case "Path | None":
                return Path(text)
            case _:
                return text
    except (ValueError, KeyError):
        raise ConfigError(f"option {key}={text!r} is not a {kind}") from None
