"""The launcher with tiny workers: ends, failures, signals. Most workers here never import torch."""

import os
import pty
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import trainer.launch as launch_module
from configs.errors import ConfigError
from configs.sft import SFTConfig
from trainer.attempts import Attempt, is_in_use
from trainer.errors import RunError
from trainer.launch import KilledError, WorkerError, launch
from trainer.run_dir import check_run_dir, open_run_dir

_WORKER = """
import logging, os, signal, sys, time
from pathlib import Path

from configs.errors import ConfigError
from trainer.errors import PeerError, RunError
from trainer.worker import run_worker


def train(config, run):
    rank, launcher = int(os.environ["RANK"]), os.getppid()
    (run.dir / f"pid_{rank}").write_text(str(os.getpid()))

    def wait_for(condition):
        while not condition():
            time.sleep(0.01)

    def both_started():
        return all((run.dir / f"pid_{other}").exists() for other in range(int(os.environ["WORLD_SIZE"])))

    BODY


run_worker(train, sys.argv[1:])
"""

_LAUNCHER = """
import sys
from pathlib import Path

from configs.sft import SFTConfig
from trainer.launch import KilledError, launch
from trainer.run_dir import open_run_dir

config = SFTConfig.model_validate_json(Path(sys.argv[1]).read_text())
attempt = open_run_dir(config, print)
command = (sys.executable, "-P", sys.argv[2])
try:
    launch(attempt, num_workers=int(sys.argv[3]), stop_timeout=30, say=print, command=command)
except KilledError as error:
    sys.exit(128 + error.signum)
"""


@pytest.fixture
def config(tmp_path: Path) -> SFTConfig:
    values = {"data": {"type": "fake"}, "output_dir": tmp_path / "outputs", "run": {"name": "run"}}
    return SFTConfig.model_validate(values)


@pytest.fixture
def worker(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a worker script whose `train` has this body."""

    def write(body: str) -> Path:
        path = tmp_path / "worker.py"
        path.write_text(_WORKER.replace("BODY", textwrap.indent(textwrap.dedent(body), "    ").strip()))
        return path

    return write


@pytest.fixture
def run(config: SFTConfig, worker: Callable[[str], Path]) -> Callable[..., Attempt]:
    """Launches, in this process, workers with this body."""

    def start(body: str, *, num_workers: int = 2, stop_timeout: float = 30) -> Attempt:
        attempt = open_run_dir(config, print)
        command = (sys.executable, "-P", str(worker(body)))
        try:
            launch(attempt, num_workers=num_workers, stop_timeout=stop_timeout, say=print, command=command)
        finally:
            attempt.close()
            assert not [pid for pid in _pids(attempt.dir) if _exists(pid)]
        return attempt

    return start


@pytest.fixture
def start_launcher(tmp_path: Path, config: SFTConfig) -> Callable[..., subprocess.Popen]:
    """Starts a launcher process of its own."""

    def start(script: Path, name: str = "run", *, num_workers: int = 2, **options) -> subprocess.Popen:
        config_file, launcher = tmp_path / f"{name}.json", tmp_path / "launcher.py"
        named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        config_file.write_text(named.model_dump_json())
        launcher.write_text(_LAUNCHER)
        command = [sys.executable, "-P", str(launcher), str(config_file), str(script), str(num_workers)]
        return subprocess.Popen(command, **options)

    return start


def _pids(run_dir: Path) -> list[int]:
    return [int(path.read_text()) for path in run_dir.glob("pid_*")]


def _exists(pid: int) -> bool:
    with suppress(OSError):
        # A process that nobody has waited for yet is dead all the same.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _wait_until(condition: Callable[[], object], seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def test_workers_get_their_environment_and_each_logs_to_its_file(
    run: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    attempt = run("""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "PYTHONSAFEPATH")
        values = [*(os.environ[name] for name in names), os.environ["HF_DATASETS_OFFLINE"]]
        logging.getLogger("trainer.test").info("env " + " ".join(values))
        logging.getLogger("elsewhere").info("other libraries are only heard from warning on")
        os.write(1, f"native {rank}\\n".encode())
    """)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    latest = attempt.dir / "logs" / "latest"
    assert latest.resolve() == (attempt.dir / "logs" / "attempt_0").resolve()
    logs = [(latest / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert f"rank 0 INFO trainer.test: env 0 0 2 localhost {threads} 1 1\n" in logs[0]
    assert f"rank 1 INFO trainer.test: env 1 1 2 localhost {threads} 1 1\n" in logs[1]
    assert "native 1" in logs[1]
    assert "other libraries" not in logs[0] + logs[1]
    console = capfd.readouterr().out
    assert "INFO env 0 0 2" in console and "native 0" in console
    assert "env 1 1 2" not in console and "native 1" not in console
    assert "OMP_NUM_THREADS" not in os.environ


def test_first_failing_rank_ends_the_others_and_its_traceback_is_last(
    run: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "_FAILURE_GRACE_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(WorkerError) as failure:
        run("""
            wait_for(both_started)
            if rank == 1:
                raise ValueError("boom")
            time.sleep(600)  # as a rank that waits in a collective: SIGTERM only sets its flag
            time.sleep(600)
        """)
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("rank 1 failed; its log: ") and lines[0].endswith("logs/attempt_0/rank_1.log")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom"
    assert "ValueError: boom" in Path(lines[0].partition("its log: ")[2]).read_text()
    assert time.monotonic() - start < 20


def test_an_error_that_follows_from_a_dead_rank_is_not_taken_for_the_cause(run: Callable[..., Attempt]) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 died of SIGSEGV; the end of its log") as failure:
        run("""
            wait_for(both_started)
            victim = int((run.dir / "pid_1").read_text())
            if rank == 1:
                print("last words", flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
            wait_for(lambda: Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
            raise ConnectionError("peer is gone")
        """)
    assert "last words" in str(failure.value)
    assert "Current thread" in str(failure.value)  # faulthandler's stack


def test_a_rank_that_fails_because_another_did_is_not_taken_for_the_cause(run: Callable[..., Attempt]) -> None:
    """As ranks do that agree on a failure: the one that knows more may be the last to leave word."""
    with pytest.raises(WorkerError, match=r"^rank 1 failed; its log: ") as failure:
        run("""
            wait_for(both_started)
            if rank == 0:
                raise PeerError("TypeError: boom")
            wait_for(lambda: (run.dir / "logs/latest/rank_0.error.json").exists())
            raise TypeError("boom")
        """)
    assert str(failure.value).splitlines()[1] == "Traceback (most recent call last):"


def test_a_rank_that_cannot_write_why_it_failed_says_it_on_the_console(
    config: SFTConfig, worker: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Field case R67: a full disk is known from a rank above 0 too, whose log and report are on that disk."""
    script = worker("""
        wait_for(both_started)
        if rank == 1:
            logging.getLogger("trainer.test").info("this line is lost")
            raise OSError(28, "No space left on device", "a/file")
        wait_for(lambda: run.stop.requested)
    """)
    attempt = open_run_dir(config, print)
    for name in ("rank_1.log", "rank_1.error.new"):
        (attempt.dir / "logs" / "attempt_0" / name).symlink_to("/dev/full")
    with pytest.raises(WorkerError, match=r"^rank 1 ended with exit code 1 and could not write why"):
        launch(attempt, num_workers=2, stop_timeout=30, say=print, command=(sys.executable, "-P", str(script)))
    attempt.close()
    log = attempt.dir / "logs" / "attempt_0" / "rank_1.log"
    assert capfd.readouterr().err.splitlines() == [
        f"rank 1: {log} cannot be written, lines are lost: No space left on device",
        "rank 1: [Errno 28] No space left on device: 'a/file'",
    ]


def test_a_log_that_cannot_be_opened_is_named(config: SFTConfig, worker: Callable[[str], Path]) -> None:
    attempt = open_run_dir(config, print)
    (attempt.dir / "logs" / "attempt_0" / "rank_1.log").mkdir()
    script = worker("wait_for(lambda: run.stop.requested)")
    with pytest.raises(RunError, match=r"Is a directory: '.*/logs/attempt_0/rank_1\.log'"):
        launch(attempt, num_workers=2, stop_timeout=30, say=print, command=(sys.executable, "-P", str(script)))
    attempt.close()


def test_a_signal_after_the_work_is_done_makes_no_failure(run: Callable[..., Attempt]) -> None:
    """Python gives signals their first meaning back while it ends: one would kill the process there."""
    attempt = run("""
        import atexit

        class Last:
            def __del__(self, kill=os.kill, pid=os.getpid(), signums=(signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)):
                for signum in signums:  # when modules are torn down, long after Python's handlers
                    kill(pid, signum)

        sys.last = Last()
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    """)
    assert not list((attempt.dir / "logs" / "attempt_0").glob("*.error.json"))


def test_errors_we_can_name_come_through_without_a_traceback(run: Callable[..., Attempt]) -> None:
    with pytest.raises(RunError, match=r"^the disk is full$"):
        run('raise RunError("the disk is full")', num_workers=1)


def test_config_errors_of_workers_come_through_with_their_keys(run: Callable[..., Attempt]) -> None:
    with pytest.raises(ConfigError) as error:
        run('raise ConfigError.one("resume.step", "there is no checkpoint")')
    assert [(fault.key, fault.message) for fault in error.value.faults] == [("resume.step", "there is no checkpoint")]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_lets_workers_stop_by_themselves(run: Callable[..., Attempt], signum: signal.Signals) -> None:
    """Field case R114 (launcher's part): the signal reaches every rank once, and none is killed while it saves."""
    attempt = run(f"""
        wait_for(both_started)
        if rank == 0:
            os.kill(launcher, {signum.value})
        wait_for(lambda: run.stop.requested)
        time.sleep(0.5)
        (run.dir / f"saved_{{rank}}").touch()
    """)
    assert sorted(path.name for path in attempt.dir.glob("saved_*")) == ["saved_0", "saved_1"]


def test_a_signal_reaches_workers_whose_logs_were_moved(run: Callable[..., Attempt]) -> None:
    attempt = run(
        """
        time.sleep(0.5)  # many looks of the launcher
        (run.dir / "logs").rename(run.dir / "moved")
        os.kill(launcher, signal.SIGTERM)
        wait_for(lambda: run.stop.requested)
        (run.dir / "saved").touch()
        """,
        num_workers=1,
    )
    assert (attempt.dir / "saved").exists()


def test_a_signal_before_a_worker_handles_it_waits_for_it(
    config: SFTConfig, worker: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that starts up dies of SIGTERM; the launcher must not send it before the worker is ready."""
    script = worker("""
        wait_for(lambda: run.stop.requested)
        (run.dir / f"saved_{rank}").touch()
    """)
    slow = (
        f"import os, signal, sys; os.kill(os.getppid(), signal.SIGTERM); import time; time.sleep(0.3); "
        f"sys.argv = ['-c', *sys.argv[1:]]; exec(open({str(script)!r}).read())"
    )
    attempt = open_run_dir(config, print)
    launch(attempt, num_workers=1, stop_timeout=30, say=print, command=(sys.executable, "-P", "-c", slow))
    attempt.close()
    assert (attempt.dir / "saved_0").exists()
    assert capsys.readouterr().out.splitlines() == [
        "SIGTERM: stopping after the work under way (Ctrl-C again ends at once)"
    ]


def test_workers_that_do_not_stop_are_killed(run: Callable[..., Attempt]) -> None:
    with pytest.raises(KilledError, match=r"did not stop within 1 s") as killed:
        run(
            """
            wait_for(both_started)
            if rank == 0:
                os.kill(launcher, signal.SIGTERM)
            wait_for(lambda: False)
        """,
            stop_timeout=1,
        )
    assert killed.value.signum == signal.SIGTERM


def test_kill_9_of_the_launcher_leaves_no_worker_and_frees_the_run_directory(
    config: SFTConfig, worker: Callable[[str], Path], start_launcher: Callable[..., subprocess.Popen]
) -> None:
    run_dir = config.output_dir / "run"
    with start_launcher(worker("wait_for(lambda: False)")) as launcher:
        _wait_until(lambda: all((run_dir / f"pid_{rank}").exists() for rank in (0, 1)))
        pids = _pids(run_dir)
        assert len(pids) == 2 and all(map(_exists, pids))
        with pytest.raises(ConfigError, match="in use by a run that has not ended"):
            check_run_dir(config.model_copy(update={"clean": True}))
        launcher.kill()
    _wait_until(lambda: not any(map(_exists, pids)), seconds=10)
    # The other threads of a killed process may outlive its main thread for a moment, with its files open.
    _wait_until(lambda: is_in_use(run_dir) is False, seconds=10)
    check_run_dir(config.model_copy(update={"clean": True}))


def test_on_a_terminal_rank_0_sees_it_and_a_second_ctrl_c_ends_at_once(
    config: SFTConfig, worker: Callable[[str], Path], start_launcher: Callable[..., subprocess.Popen]
) -> None:
    run_dir = config.output_dir / "run"
    script = worker("""
        (run.dir / f"terminal_{rank}").write_text(str(sys.stdout.isatty()))
        wait_for(lambda: run.stop.requested)
        (run.dir / f"asked_{rank}").touch()
        wait_for(lambda: False)
    """)
    master, slave = pty.openpty()

    def take_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    with start_launcher(script, start_new_session=True, preexec_fn=take_terminal, **streams) as launcher:
        _wait_until(lambda: all((run_dir / f"terminal_{rank}").exists() for rank in (0, 1)))
        assert [(run_dir / f"terminal_{rank}").read_text() for rank in (0, 1)] == ["True", "False"]
        os.write(master, b"\x03")
        _wait_until(lambda: all((run_dir / f"asked_{rank}").exists() for rank in (0, 1)))
        time.sleep(0.6)  # two key presses of a person
        os.write(master, b"\x03")
        assert launcher.wait(20) == 130
    assert not any(map(_exists, _pids(run_dir)))
    os.close(master)
    os.close(slave)


def test_two_runs_share_a_node_whose_port_29500_is_taken(
    config: SFTConfig, worker: Callable[[str], Path], start_launcher: Callable[..., subprocess.Popen]
) -> None:
    """Field case R116: two jobs on one node, port 29500 occupied: both start."""
    script = worker("""
        import socket

        assert os.environ["MASTER_PORT"] != "29500"
        (run.dir / f"ready_{rank}").touch()
        ready = [run.dir.parent / name / f"ready_{other}" for name in ("one", "two") for other in (0, 1)]
        wait_for(lambda: all(path.exists() for path in ready))
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
        (run.dir / f"port_{rank}").write_text(os.environ["MASTER_PORT"])
    """)
    with socket.socket() as occupier:
        with suppress(OSError):  # taken already is as good
            occupier.bind(("localhost", 29500))
            occupier.listen()
        launchers = [start_launcher(script, name) for name in ("one", "two")]
        assert [launcher.wait(120) for launcher in launchers] == [0, 0]
    outputs = config.output_dir
    ports = [[(outputs / name / f"port_{rank}").read_text() for rank in (0, 1)] for name in ("one", "two")]
    assert ports[0][0] == ports[0][1] != ports[1][0] == ports[1][1]
