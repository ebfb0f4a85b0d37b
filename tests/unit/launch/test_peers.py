"""What follows from what the launchers of several nodes say, without processes."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from configs.errors import ConfigError, Fault
from trainer.errors import RunError
from trainer.failures import (
    CRASHED,
    FOLLOWED,
    OWN,
    Failure,
    KilledError,
    WorkerError,
    failure_of,
    first_cause,
    load_failure,
)
from trainer.peers.nodes import LOST_SECONDS, NodeState, Peers, Verdict, _Host
from trainer.peers.notice import find_host, put_up, put_up_failure
from trainer.peers.store import host_meeting, join_meeting


class FakeStore:
    """What nodes write, and the time."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.now = 100.0
        self._turns = 0

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key].encode() for key in keys]

    def say(self, node: int, state: NodeState) -> None:
        self._turns += 1
        self.values[f"peers/node/{node}"] = json.dumps({"turn": self._turns, "state": asdict(state)})


class Room:
    """Node 0's view of nodes that say what a test wants."""

    def __init__(self, num_nodes: int) -> None:
        self.store = FakeStore()
        self.states = {node: NodeState(name=f"gpu-{node}") for node in range(num_nodes)}
        self.host = _Host(num_nodes, lambda: self.store.now)

    def turn(self, *silent: int, seconds: float = 0.5) -> Verdict:
        """Some time later, when all but the silent ones have said their state."""
        self.store.now += seconds
        for node, state in self.states.items():
            if node > 0 and node not in silent:
                self.store.say(node, state)
        self.host.hear(self.store, self.states[0])  # pyright: ignore[reportArgumentType]
        return self.host.judge()

    def set(self, node: int, **changes) -> None:
        self.states[node] = NodeState(**asdict(self.states[node]) | changes)


def failure(message: str, *, time: float, weight: int = OWN) -> Failure:
    return Failure(kind="worker", message=message, time=time, weight=weight)


def cause(verdict: Verdict) -> Failure:
    assert verdict.over and verdict.failure is not None
    return load_failure(verdict.failure)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError([Fault(key="model.cp", message="3 does not divide 4"), Fault(key="data", message="gone")]),
        RunError("the disk is full"),
        WorkerError("rank 3 died"),
        KilledError(10, "did not stop"),
    ],
)
def test_a_failure_is_sent_and_raised_as_what_it_was(error: Exception) -> None:
    sent = load_failure(failure_of(error, time=5.0).dump())
    assert sent.time == 5.0
    raised = sent.error()
    assert type(raised) is type(error) and str(raised) == str(error)
    assert getattr(raised, "signum", None) == getattr(error, "signum", None)
    assert getattr(raised, "faults", None) == getattr(error, "faults", None)


def test_what_nothing_else_brings_about_is_the_cause_and_then_the_earliest() -> None:
    follower, own, later = failure("a", time=1, weight=FOLLOWED), failure("b", time=2), failure("c", time=3)
    crash, killed = failure("d", time=9, weight=CRASHED), failure_of(KilledError(15, "e"), time=10)
    assert first_cause([]) is None
    assert first_cause([follower]) is follower
    assert first_cause([later, follower, own]) is own
    assert first_cause([later, follower, own, crash]) is crash
    assert first_cause([later, crash, killed]) is killed


def test_nodes_begin_when_all_are_there_and_end_when_all_have() -> None:
    room = Room(3)
    assert not room.turn(1, 2).all_here
    assert room.host.missing() == "nodes 1, 2"
    assert not room.turn(2).all_here
    assert room.host.missing() == "node 2"
    assert room.turn() == Verdict(all_here=True)
    room.set(1, ended=True)
    room.set(2, ended=True)
    assert room.turn() == Verdict(all_here=True)
    room.set(0, ended=True)
    assert room.turn() == Verdict(all_here=True, over=True)
    assert not room.host.all_left()
    for node in range(3):
        room.set(node, has_left=True)
    room.turn()
    assert room.host.all_left()


def test_the_first_signal_and_the_first_failure_stay() -> None:
    room = Room(3)
    room.set(2, stop=10)
    assert (room.turn().stop, room.turn().stop_node) == (10, "node 2 (gpu-2)")
    room.set(1, stop=15, failing=True)
    verdict = room.turn()
    assert (verdict.stop, verdict.stop_node, verdict.failing) == (10, "node 2 (gpu-2)", "node 1 (gpu-1) fails")
    room.set(0, failing=True)
    assert room.turn().failing == "node 1 (gpu-1) fails"


def test_a_silent_node_is_lost_and_is_the_cause_of_what_others_say_later() -> None:
    room = Room(3)
    room.turn()
    assert not room.turn(2, seconds=LOST_SECONDS).failing
    room.set(0, ended=True, failure=failure("peer is gone", time=2e12).dump())
    room.set(1, ended=True)
    verdict = room.turn(2)
    assert verdict.failing == "node 0 (gpu-0) fails" or verdict.failing == "node 2 (gpu-2) is lost"
    found = cause(verdict)
    assert found.message.startswith("node 2 (gpu-2) is lost: no word for 20 s")
    assert isinstance(found.error(), WorkerError)
    # Come back to life, it reads that all is over.
    assert room.turn() == verdict


def test_a_node_lost_after_a_stop_was_asked_for_is_one_that_was_killed() -> None:
    """All nodes got the signal; one of them before it could handle it."""
    room = Room(2)
    room.turn()
    room.set(0, stop=10, ended=True)
    room.turn(1, seconds=LOST_SECONDS + 1)
    error = cause(room.turn(1)).error()
    assert isinstance(error, KilledError) and error.signum == 10


def test_a_node_that_is_lost_when_its_workers_had_ended_is_no_failure() -> None:
    room = Room(2)
    room.set(1, ended=True)
    room.turn()
    room.turn(1, seconds=LOST_SECONDS + 1)
    room.set(0, ended=True)
    verdict = room.turn(1)
    assert verdict.over and verdict.failure is None


def test_a_node_that_does_not_end_is_not_waited_for_for_ever() -> None:
    room = Room(2)
    room.turn()
    room.set(0, ended=True, failing=True, failure=failure("boom", time=1).dump())
    assert not room.turn().over
    assert not room.turn(seconds=39).over
    assert cause(room.turn(seconds=2)).message == "boom"


def test_nodes_that_never_come_do_not_keep_those_that_did() -> None:
    room = Room(3)
    room.turn(2)
    room.set(0, ended=True, failing=True, failure=failure("node 2 did not come", time=1).dump())
    assert not room.turn(2).over
    room.set(1, ended=True)
    assert cause(room.turn(2)).message == "node 2 did not come"


def test_two_launchers_agree_on_the_cause(tmp_path: Path) -> None:
    notice = tmp_path / "slurm" / "job_1_0.json"
    meeting = host_meeting(num_nodes=2)
    put_up(notice, meeting, attempt=3, node_name="no-such-host")
    joined, attempt = find_host(notice, node_rank=1, num_nodes=2, seconds=10, say=print)
    assert attempt == 3 and joined.port == meeting.port and joined.address == "localhost"
    host, other = Peers(meeting, "a"), Peers(joined, "b", ranks="rank 1")
    host.start()
    other.start()
    host.wait_for_all(10)
    other.wait_for_all(10)
    other.tell(ended=True, failure=failure("boom", time=5))
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(other.settle, None)
        found = host.settle(failure("peer is gone", time=6))
    assert found is not None and found.message == "boom" and settled.result() == found


def test_a_store_of_another_run_at_the_same_port_is_not_taken() -> None:
    meeting = host_meeting(num_nodes=2)
    assert join_meeting(["localhost"], meeting.port, "another", node_rank=1, num_nodes=2) is None
    # No name that cannot be resolved, nor a port where nobody listens, is more than passed over.
    assert join_meeting(["no-such-host.invalid", "localhost"], meeting.port, meeting.token, node_rank=1, num_nodes=2)


def test_a_host_that_cannot_begin_or_be_reached_is_told(tmp_path: Path) -> None:
    notice = tmp_path / "job_1_0.json"
    with pytest.raises(RunError, match=r"^node 0 did not begin within 0 s: there is no .*job_1_0\.json"):
        find_host(notice, node_rank=1, num_nodes=2, seconds=0, say=print)
    meeting = host_meeting(num_nodes=2)
    put_up(notice, meeting, attempt=0, node_name="gpu-0.invalid")
    port = meeting.port
    del meeting
    with pytest.raises(RunError, match=rf"cannot be reached at gpu-0\.invalid:{port} or .* within 0 s: it ended, or"):
        find_host(notice, node_rank=1, num_nodes=2, seconds=0, say=print)
    put_up_failure(notice, failure_of(ConfigError.one("run.name", "is in use"), time=1.0))
    with pytest.raises(ConfigError) as error:
        find_host(notice, node_rank=1, num_nodes=2, seconds=0, say=print)
    assert [(fault.key, fault.message) for fault in error.value.faults] == [("run.name", "is in use")]
