from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from tests.tidemill.process import GIVE_UP_S, ended, wait_until
from tidemill.child import Child, ChildSpec, Policy
from tidemill.errors import ConfigError
from tidemill.supervisor import SupervisionError, Supervisor, supervised

ROOT = Path(__file__).parents[2]
BEAT = "import os, sys, time, signal; beat = lambda: os.write(int(os.environ['TIDEMILL_HEARTBEAT_FD']), b'.'); "
SERVE = BEAT + "beat(); time.sleep(600)"
# no hang in these stories: most of their children beat once only
QUICK = Policy(pause_s=0.01, pause_max_s=0.05, hang_s=10 * GIVE_UP_S)


def python(name: str, script: str, *, tier: int = 0, beats: bool = True) -> ChildSpec:
    return ChildSpec(
        name=name, argv=(sys.executable, "-c", script), env={"PYTHONPATH": str(ROOT)}, tier=tier, beats=beats
    )


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        supervisor.request_stop()
        await asyncio.wait_for(task, GIVE_UP_S)


async def becomes(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while not condition():  # noqa: ASYNC110 - other processes have no event
            await asyncio.sleep(0.005)


def pid_of(supervisor: Supervisor, name: str) -> int:
    pid = supervisor.children[name].pid
    assert pid is not None
    return pid


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_killed_child_is_started_again_and_its_neighbour_left_alone(tmp_path: Path, loop_factory):
    said: list[str] = []

    async def story() -> None:
        specs = [python("victim", SERVE), python("neighbour", SERVE)]
        supervisor = Supervisor(specs, log_dir=tmp_path, policy=QUICK, report=said.append)
        async with running(supervisor):
            await supervisor.wait_ready()
            first, neighbour = pid_of(supervisor, "victim"), pid_of(supervisor, "neighbour")
            os.kill(first, signal.SIGKILL)
            await becomes(lambda: supervisor.children["victim"].pid not in (None, first))
            assert pid_of(supervisor, "neighbour") == neighbour
        assert ended(neighbour)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(story())
    assert said == ["victim was ended by SIGKILL; starting it again in 0.0 s"]


async def test_pauses_double_up_to_the_longest_and_start_over_after_a_healthy_life(tmp_path: Path):
    patient = Policy(crash_exits=99, healthy_s=float("inf"))
    child = Child(python("brief", ""), log_dir=tmp_path, policy=patient)
    assert [child.pause_before_restart() for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]

    healthy = Child(python("lasting", ""), log_dir=tmp_path, policy=Policy(crash_exits=99, healthy_s=0.0))
    assert [healthy.pause_before_restart() for _ in range(3)] == [0.1, 0.1, 0.1]


async def test_ends_far_apart_are_no_crash_loop(tmp_path: Path):
    child = Child(python("unlucky", ""), log_dir=tmp_path, policy=Policy(crash_exits=2, crash_window_s=0.0))
    child.pause_before_restart()
    await asyncio.sleep(0.01)
    assert child.pause_before_restart() is not None


async def test_a_crash_loop_stops_the_whole_set_and_quotes_the_last_words(tmp_path: Path):
    specs = [
        python("steady", SERVE),
        python("broken", "import sys; print('there are no weights in /models'); sys.exit(3)"),
    ]
    supervisor = Supervisor(specs, log_dir=tmp_path, policy=QUICK)
    with pytest.raises(SupervisionError) as caught:
        await supervisor.run()
    message = str(caught.value)
    assert message.startswith("broken ended with exit code 3, its end number 5 within ")
    assert "this is a crash loop" in message
    assert message.endswith("there are no weights in /models")
    assert supervisor.children["broken"].num_starts == QUICK.crash_exits
    assert supervisor.children["steady"].pid is None


async def test_a_child_that_can_never_run_as_configured_is_not_tried_again(tmp_path: Path):
    script = f"import sys; print('JetStream is not enabled'); sys.exit({ConfigError.exit_code})"
    supervisor = Supervisor([python("hopeless", script)], log_dir=tmp_path, policy=QUICK)
    with pytest.raises(SupervisionError, match=r"hopeless .*cannot run as configured(.|\n)*JetStream is not enabled"):
        await supervisor.run()
    assert supervisor.children["hopeless"].num_starts == 1


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path):
    supervisor = Supervisor([ChildSpec(name="ghost", argv=("/nonexistent/program",))], log_dir=tmp_path)
    with pytest.raises(SupervisionError, match=r"ghost cannot be started: .*/nonexistent/program"):
        await supervisor.run()


async def test_a_silent_heart_is_killed_but_only_one_that_has_beaten(tmp_path: Path):
    said: list[str] = []
    specs = [
        python("hung", BEAT + "beat(); os.kill(os.getpid(), signal.SIGSTOP)"),
        python("loading", "import time; time.sleep(600)"),
        python("alive", "import asyncio; from tidemill.heartbeat import beat; asyncio.run(beat(0.01))"),
    ]
    policy = Policy(pause_s=0.01, pause_max_s=0.01, hang_s=0.5, crash_exits=99)
    supervisor = Supervisor(specs, log_dir=tmp_path, policy=policy, report=said.append)
    async with running(supervisor):
        await becomes(lambda: supervisor.children["hung"].num_starts == 3)
        assert supervisor.children["alive"].num_starts == 1
        assert supervisor.children["loading"].num_starts == 1
        assert supervisor.waiting_for() == ["loading"]
    assert said[0] == "hung was hung (no heartbeat for 0.5 s) and was killed; starting it again in 0.0 s"


def logs_its_end(path: Path, name: str, last_work_s: float) -> str:
    return (
        BEAT
        + f"say = lambda what: open({str(path)!r}, 'a').write('{name} ' + what + '\\n')\n"
        + f"def drain(*_): say('asked'); time.sleep({last_work_s}); say('ended'); sys.exit()\n"
        + "signal.signal(signal.SIGTERM, drain); beat(); time.sleep(600)"
    )


async def test_a_higher_tier_has_drained_before_a_lower_one_is_asked_to(tmp_path: Path):
    story = tmp_path / "story"
    specs = [
        python("broker", logs_its_end(story, "broker", 0), tier=0),
        python("engine", logs_its_end(story, "engine", 0.1), tier=1),
        python("owner", logs_its_end(story, "owner", 0.3), tier=2),
    ]
    supervisor = Supervisor(specs, log_dir=tmp_path, policy=QUICK)
    async with running(supervisor):
        await supervisor.wait_ready()
    asked_and_ended = [f"{name} {what}" for name in ("owner", "engine", "broker") for what in ("asked", "ended")]
    assert story.read_text().splitlines() == asked_and_ended


async def test_while_a_higher_tier_drains_a_lower_one_is_still_kept_alive(tmp_path: Path):
    story = tmp_path / "story"
    story.touch()
    specs = [python("engine", SERVE, tier=0), python("owner", logs_its_end(story, "owner", 0.5), tier=1)]
    supervisor = Supervisor(specs, log_dir=tmp_path, policy=QUICK)
    async with running(supervisor):
        await supervisor.wait_ready()
        supervisor.request_stop()
        await becomes(lambda: "asked" in story.read_text())
        os.kill(pid_of(supervisor, "engine"), signal.SIGKILL)
        await becomes(lambda: supervisor.children["engine"].num_starts == 2)
        assert "ended" not in story.read_text()


async def test_a_child_deaf_to_sigterm_is_killed_when_the_drain_time_is_over(tmp_path: Path):
    said: list[str] = []
    deaf = python("deaf", BEAT + "signal.signal(signal.SIGTERM, signal.SIG_IGN); beat(); time.sleep(600)")
    supervisor = Supervisor([deaf], log_dir=tmp_path, policy=replace(QUICK, drain_s=0.2), report=said.append)
    async with running(supervisor):
        await supervisor.wait_ready()
        pid = pid_of(supervisor, "deaf")
    assert ended(pid)
    assert said == ["deaf did not end within 0.2 s: killed"]


async def test_asking_twice_does_not_wait_for_the_drain(tmp_path: Path):
    deaf = python("deaf", BEAT + "signal.signal(signal.SIGTERM, signal.SIG_IGN); beat(); time.sleep(600)")
    supervisor = Supervisor([deaf], log_dir=tmp_path, policy=replace(QUICK, drain_s=10 * GIVE_UP_S))
    async with running(supervisor):
        await supervisor.wait_ready()
        supervisor.request_stop()  # and once more on the way out


async def test_a_stop_in_the_pause_before_a_restart_starts_nothing(tmp_path: Path):
    said: list[str] = []
    policy = Policy(pause_s=10 * GIVE_UP_S, pause_max_s=10 * GIVE_UP_S)
    supervisor = Supervisor([python("brief", "")], log_dir=tmp_path, policy=policy, report=said.append)
    async with running(supervisor):
        await becomes(lambda: said)
    assert supervisor.children["brief"].num_starts == 1


async def test_a_child_that_was_being_started_when_the_stop_came_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    supervisor = Supervisor([python("late", SERVE)], log_dir=tmp_path, policy=QUICK)
    start = Child.start

    async def start_after_the_stop(child: Child) -> None:
        if child.num_starts == 1:
            supervisor.request_stop()
            await child.stopping.wait()
        await start(child)

    monkeypatch.setattr(Child, "start", start_after_the_stop)
    run = asyncio.create_task(supervisor.run())
    await supervisor.wait_ready()
    os.kill(pid_of(supervisor, "late"), signal.SIGKILL)
    await asyncio.wait_for(run, GIVE_UP_S)
    assert supervisor.children["late"].num_starts == 2
    assert supervisor.children["late"].pid is None


async def test_the_body_of_supervised_is_left_when_the_set_cannot_be_kept_alive(tmp_path: Path):
    with pytest.raises(SupervisionError, match="crash loop"):
        async with supervised([python("broken", "exit(1)")], log_dir=tmp_path, policy=QUICK):
            await asyncio.sleep(10 * GIVE_UP_S)


async def test_an_error_in_the_body_of_supervised_stops_the_children_and_stays_what_it_is(tmp_path: Path):
    pids = []

    async def body() -> None:
        async with supervised([python("one", SERVE)], log_dir=tmp_path, policy=QUICK) as supervisor:
            await supervisor.wait_ready()
            pids.append(pid_of(supervisor, "one"))
            raise KeyError("from the body")

    with pytest.raises(KeyError, match="from the body"):
        await body()
    assert ended(*pids)


async def test_cancelling_stops_the_children_too(tmp_path: Path):
    supervisor = Supervisor([python("one", SERVE)], log_dir=tmp_path, policy=QUICK)
    task = asyncio.create_task(supervisor.run())
    await supervisor.wait_ready()
    pid = pid_of(supervisor, "one")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended(pid)


def test_no_child_outlives_a_supervisor_killed_with_sigkill(tmp_path: Path):
    script = f"""
import asyncio
from pathlib import Path
from tests.tidemill.test_supervisor import SERVE, python
from tidemill.supervisor import Supervisor

async def main():
    supervisor = Supervisor([python("one", SERVE), python("two", SERVE)], log_dir=Path({str(tmp_path)!r}))
    run = asyncio.create_task(supervisor.run())
    await supervisor.wait_ready()
    print(*(child.pid for child in supervisor.children.values()), flush=True)
    await run

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(ended(pid) for pid in pids)
        supervisor.kill()
        wait_until(lambda: all(ended(pid) for pid in pids), f"of {pids} some outlived their supervisor")


async def test_names_are_unique_because_logs_are_named_by_them(tmp_path: Path):
    with pytest.raises(ValueError, match="not unique"):
        Supervisor([python("same", ""), python("same", "")], log_dir=tmp_path)


async def test_a_long_log_is_put_aside_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tidemill.child.LOG_KEPT_BYTES", 10)
    child = Child(python("wordy", "print('more than ten bytes')"), log_dir=tmp_path, policy=QUICK)
    for _ in range(2):
        await child.start()
        await child.wait()
    assert child.log_path.read_text() == "more than ten bytes\n"
    assert child.log_path.with_suffix(".log.1").read_text() == "more than ten bytes\n"
