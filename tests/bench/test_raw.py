import subprocess

import pytest

from bench.raw import Chain, receivers


def test_the_chain_of_a_request_visits_the_first_process_twice():
    assert receivers(6) == ["A", "B1", "B2", "B3", "A", "client"]
    assert receivers(3) == ["A", "A", "client"]


def test_every_round_is_timed_and_every_process_ended(nats_url):
    with Chain(nats_url, [300_000, 0, 1, 40_000, 128, 64]) as chain:
        for rounds in (20, 5):
            times = chain.times(rounds)
            assert len(times) == rounds
            assert all(seconds > 0 for seconds in times)
    assert (
        "bench/raw.py" not in subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    )


def test_a_chain_that_is_too_short_is_refused(nats_url):
    with pytest.raises(ValueError, match="at least 3"):
        Chain(nats_url, [1, 2])


def test_a_chain_without_a_server_fails_at_once_with_a_name():
    with pytest.raises(RuntimeError, match="did not start"), Chain("nats://127.0.0.1:1", [1, 2, 3]):
        pass


def test_a_payload_that_the_server_refuses_is_an_error_not_a_hang(nats_url):
    with pytest.raises(RuntimeError, match="failed"), Chain(nats_url, [2_000_000, 1, 1]):
        pass
