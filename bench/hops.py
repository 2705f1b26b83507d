"""What the pipeline itself costs: latency of the hops, CPU per request, CPU per streamed token.

    python -m bench.hops [--json] [--quick] [--record]

Four worker processes (codec + parse, lookup, prefill, decode + transfer) with the stub engine and a nats-server of
their own. Latency is a ratio to a raw-client chain of the same causal deliveries and sizes, in alternating rounds of
one run. CPU times are of the kernel's process clocks; repeats keep the smallest sum, because noise only adds.
bench/README.md says what each figure is.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop

from bench.cost import IN_FLIGHT, TOKENS, Cost, cost
from bench.latency import SHORTEST, Latency, Slices, beside_chain, causal_sizes
from bench.processes import BROKER, Fleet
from bench.prompts import body
from bench.raw import Chain
from bench.token_rate import Load, TokenRate, token_rate

RESULTS = Path(__file__).parent / "results" / "hops.csv"
STEP_S = "0.005"  # of the paced figure: facts-spikes 6.2 shows that the step time must be said
STREAM_STEP_S = "0.009"  # 1,200 streams: up to 133 k tok/s, the loop's timers have a grain of a millisecond
# figure -> (budget, goal or 0). Source: design 8
BUDGETS = {
    "hops_ratio": (4.0, 0.0),
    "hops_p50_ms": (0.0, 1.2),
    "cpu_ms_per_request": (1.5, 1.0),
    "cpu_ms_per_request_5ms": (2.5, 0.0),
    "cpu_us_per_token": (4.0, 3.0),
    "fabric_us_per_token": (2.0, 0.0),
}

FULL_SLICES = Slices()
FULL_LOAD = Load(num_streams=1_200, max_tokens=1_100, warm_tokens=400_000, longest_s=5.0)

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to run."""

    rounds: int = 5
    slices: Slices = FULL_SLICES
    repeats: int = 3
    requests: int = 2_000
    paced_requests: int = 600
    stream_repeats: int = 2
    load: Load = FULL_LOAD
    timeout_s: float = 60.0  # of each measurement but the streams', which has its own


QUICK = Plan(
    rounds=1,
    slices=Slices(slices=1, chain_rounds=50, requests=20),
    repeats=1,
    requests=64,
    paced_requests=32,
    stream_repeats=1,
    load=Load(num_streams=100, max_tokens=200, warm_tokens=200, longest_s=1.0),
)


def measure(plan: Plan, say: Callable[[str], None]) -> Figures:
    """All figures. Blocks for two to three minutes (QUICK: 15 s). Raises: ProcessError, RuntimeError, TimeoutError."""
    with Fleet() as fleet:
        say("starting workers")
        codec, _, _ = (fleet.start(stage) for stage in ("codec", "lookup", "prefill"))
        decode = fleet.start("decode")
        figures = _latency(fleet, plan, codec, decode, say)
        say("CPU per request, the stub stepping at once")
        at_once = _cheapest([uvloop.run(cost(fleet, plan.requests, plan.timeout_s)) for _ in range(plan.repeats)])
        figures |= _cost_figures(at_once, "")
        fleet.stop(decode)
        decode = fleet.start("decode", stub_step_s=STEP_S)
        say(f"CPU per request, a step every {STEP_S} s")
        paced = _cheapest([uvloop.run(cost(fleet, plan.paced_requests, plan.timeout_s)) for _ in range(plan.repeats)])
        figures |= _cost_figures(paced, "_5ms")
        fleet.stop(decode)
        fleet.start("decode", stub_step_s=STREAM_STEP_S)
        return figures | _streams(fleet, plan, codec, say)


def _latency(fleet: Fleet, plan: Plan, codec: str, decode: str, say: Callable[[str], None]) -> Figures:
    url = fleet.url
    sizes = uvloop.run(causal_sizes(url, codec, decode, plan.timeout_s))  # warms caches, too
    rounds: list[tuple[float, Latency, Latency]] = []
    with Chain(url, list(sizes.values())) as chain:
        for number in range(1, plan.rounds + 1):
            say(f"latency, round {number} of {plan.rounds}")
            rounds.append(uvloop.run(beside_chain(url, chain, plan.slices, plan.timeout_s)))
    floors, hops, longer = zip(*rounds, strict=True)
    best, floor = min(latency.second_s for latency in hops), min(floors)
    return {
        "hops_p50_ms": 1e3 * best,
        "floor_p50_ms": 1e3 * floor,
        "hops_ratio": best / floor,
        "hops_ratio_of_rounds": statistics.median(h.second_s / f for f, h in zip(floors, hops, strict=True)),
        "first_event_p50_ms": 1e3 * min(latency.first_s for latency in hops),
        "hops_16_tokens_p50_ms": 1e3 * min(latency.second_s for latency in longer),
        "causal_sizes_bytes": sizes,
        "rounds_ms": [[_rounded(1e3 * f), _rounded(1e3 * h.second_s)] for f, h in zip(floors, hops, strict=True)],
    }


def _cheapest(costs: list[Cost]) -> Cost:
    return min(costs, key=lambda each: each.total)


def _cost_figures(cheapest: Cost, suffix: str) -> Figures:
    return {
        f"cpu_ms_per_request{suffix}": cheapest.total,
        f"cpu_ms_by_process{suffix}": cheapest.by_role,
        f"client_cpu_ms_per_request{suffix}": cheapest.client,
        f"requests_per_s{suffix}": cheapest.requests_per_s,
    }


def _streams(fleet: Fleet, plan: Plan, codec: str, say: Callable[[str], None]) -> Figures:
    real = _rate(fleet, plan, "with JSON", say)
    fleet.stop(codec)
    fleet.run("codec", "bench.constant_codec", fleet.url, str(real.event_bytes))
    fabric = _rate(fleet, plan, "with constant events", say)
    return {
        "cpu_us_per_token": real.total,
        "fabric_us_per_token": fabric.total,
        "tokens_per_s": real.tokens_per_s,
        "fabric_tokens_per_s": fabric.tokens_per_s,
        "parse_us_per_token": real.by_role["codec"],
        "broker_us_per_token": real.by_role[BROKER],
        "subscriber_us_per_token": real.by_role["subscriber"],
        "decode_us_per_token": real.by_role["decode"],
        "fabric_parse_us_per_token": fabric.by_role["codec"],
        "event_bytes": real.event_bytes,
        "wire_bytes_per_token": real.wire_bytes,
        "num_streams": plan.load.num_streams,
    }


def _rate(fleet: Fleet, plan: Plan, what: str, say: Callable[[str], None]) -> TokenRate:
    rates = []
    for number in range(1, plan.stream_repeats + 1):
        say(f"{plan.load.num_streams} streams {what}, {number} of {plan.stream_repeats}")
        rates.append(uvloop.run(token_rate(fleet, plan.load)))
    return min(rates, key=lambda rate: rate.total)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def surroundings() -> Figures:
    """What the figures depend on and did not measure."""
    return {
        "num_cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "in_flight": IN_FLIGHT,
        "tokens_per_request": TOKENS,
        "tokens_one_in_flight": SHORTEST,
        "body_bytes": len(body(TOKENS)),
    }


def table(figures: Figures) -> str:
    """Figures for people, the budgets beside them."""
    lines = []
    for name, value in figures.items():
        budget, goal = BUDGETS.get(name, (0.0, 0.0))
        limits = [f"budget {budget:g}"] * bool(budget) + [f"goal {goal:g}"] * bool(goal)
        verdict = " MISSED" if budget and value > budget else ""
        lines.append(f"{name:28} {value!s:>10}  {', '.join(limits)}{verdict}".rstrip())
    return "\n".join(lines)


def machine() -> Figures:
    """What a row of results begins with: when, where, what code."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} x {_cpu_model()}",
        "commit": _commit(),
    }


def record(figures: Figures) -> None:
    """Append the plain figures to bench/results/hops.csv."""
    plain = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    row = machine() | {"command": "python -m bench.hops", "load_1min": figures["load_average"][0]} | plain
    RESULTS.parent.mkdir(exist_ok=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=RESULTS.parent, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603


def main() -> None:
    """Print the figures, one JSON object with --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="a small run that shows whether it works; no real figures")
    parser.add_argument("--record", action="store_true", help="append a row to bench/results/hops.csv")
    options = parser.parse_args()
    if options.record and options.quick:
        parser.error("a quick run is not worth recording")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what we started is ended in order
    found = measure(QUICK if options.quick else Plan(), lambda line: print(f"bench.hops: {line}", file=sys.stderr))
    figures = _rounded(found | surroundings())
    if options.record:
        record(figures)
    print(json.dumps(figures) if options.json else table(figures))


if __name__ == "__main__":
    main()
