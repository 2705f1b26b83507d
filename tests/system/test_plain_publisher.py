"""The publisher of docs/protocol.md is what it claims: plain nats-py, short, and it loses and repeats nothing."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from tests.system.fleet import GIVE_UP_S, ROOT, Fleet

MAX_LINES = 30
BLOCK = re.compile(r"<!-- subscriber:begin -->\s*```python\n(.*?)```\s*<!-- subscriber:end -->", re.DOTALL)


@pytest.fixture(scope="module")
def program() -> str:
    found = BLOCK.search((ROOT / "docs" / "protocol.md").read_text(encoding="utf-8"))
    assert found, "docs/protocol.md has no python block between its subscriber marks"
    return found[1]


def test_it_is_short_and_imports_nothing_of_ours(program: str):
    assert sum(bool(line.strip()) for line in program.splitlines()) <= MAX_LINES
    imports = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Import)]
    assert {alias.name for node in imports for alias in node.names} == {"asyncio", "json", "secrets", "sys", "nats"}


@pytest.mark.parametrize(("pace", "step_s"), [("ended", 0.0), ("streaming", 0.02)])
async def test_each_event_arrives_once_over_its_two_connections(
    new_fleet: Fleet, program: str, tmp_path: Path, pace: str, step_s: float
):
    """Once with the request long over when the second connection asks, once with it in its middle."""
    path = tmp_path / "publisher.py"
    path.write_text(program, encoding="utf-8")
    for stage in ("codec", "lookup", "prefill"):
        if f"{stage}-0" not in new_fleet.workers:
            new_fleet.start(stage, name=f"{stage}-0")
    with new_fleet.running("decode", name=f"decode-{pace}", stub_step_s=step_s):
        await new_fleet.ready()
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(path), new_fleet.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(GIVE_UP_S):
            out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    lines = [line.split(" ", 1) for line in out.decode().splitlines()]
    assert [int(number) for number, _ in lines] == list(range(len(lines)))
    assert len(lines) > 16
    last = json.loads(lines[-1][1])
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 32
