"""When ranks count as hanging, and which of them are named."""

import json
import os
from pathlib import Path

import pytest

from trainer.flight_recorder import Absence, Collective, find_absences, read_collectives
from trainer.heartbeat import Beat, Heartbeat, Phase
from trainer.run import rank_heartbeat
from trainer.watchdog import SLOW_PHASE_SECONDS, Watchdog, describe_hang, name_ranks, process_state

ALL = ("0", "default_pg")


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def start(folder: Path, ranks: int = 2) -> tuple[list[Heartbeat], Watchdog, Clock]:
    rank_heartbeat(folder, 0, 0).parent.mkdir(parents=True)
    heartbeats = [Heartbeat(rank_heartbeat(folder, 0, rank)) for rank in range(ranks)]
    clock = Clock()
    return heartbeats, Watchdog(folder, 0, range(ranks), 10, clock=clock), clock


def test_ranks_hang_when_none_has_moved_for_the_time(tmp_path: Path) -> None:
    heartbeats, watchdog, clock = start(tmp_path)
    for step, seconds in ((1, 1), (2, 9), (3, 9.5), (4, 10)):
        clock.now += seconds
        heartbeats[step % 2].beat(Phase.FORWARD_BACKWARD, step)  # one that moves is enough
        assert not watchdog.is_stuck()
    heartbeats[0].beat(Phase.DATA, 5)
    heartbeats[1].beat(Phase.FORWARD_BACKWARD, 5)
    clock.now += 1
    assert not watchdog.is_stuck()
    clock.now += 10
    assert not watchdog.is_stuck()
    clock.now += 0.6
    assert watchdog.is_stuck() and watchdog.seconds == pytest.approx(10.6)


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.FIRST_STEP, Phase.VALIDATION, Phase.ENDING])
def test_one_rank_in_a_long_phase_gives_all_more_time(tmp_path: Path, phase: Phase) -> None:
    heartbeats, watchdog, clock = start(tmp_path)
    heartbeats[0].beat(Phase.FORWARD_BACKWARD, 1)
    heartbeats[1].beat(phase, 1)
    clock.now += 1
    assert not watchdog.is_stuck()
    for _ in range(int(SLOW_PHASE_SECONDS + 9)):
        clock.now += 1
        assert not watchdog.is_stuck()
    clock.now += 2
    assert watchdog.is_stuck()


def test_heartbeats_that_are_gone_are_no_hang(tmp_path: Path) -> None:
    _, watchdog, clock = start(tmp_path)
    clock.now += 1
    assert not watchdog.is_stuck()
    for rank in range(2):
        rank_heartbeat(tmp_path, 0, rank).unlink()
    clock.now += 50
    assert not watchdog.is_stuck()


def test_the_time_in_which_nobody_could_look_does_not_count(tmp_path: Path) -> None:
    heartbeats, watchdog, clock = start(tmp_path)
    for heartbeat in heartbeats:
        heartbeat.beat(Phase.FORWARD_BACKWARD, 1)
    clock.now += 1
    assert not watchdog.is_stuck()
    clock.now += 3600
    assert not watchdog.is_stuck()
    clock.now += 11
    assert watchdog.is_stuck()


def test_without_any_sign_nothing_is_watched(tmp_path: Path) -> None:
    clock = Clock()
    watchdog = Watchdog(tmp_path, 0, range(2), 10, clock=clock)
    clock.now += 1e6
    assert not watchdog.is_stuck()


def beat(phase: Phase, step: int = 7) -> Beat:
    return Beat(number=1, phase=phase, step=step, time=0.0)


def came(number: int, name: str = "nccl:all_gather", group: tuple[str, str] = ALL) -> Collective:
    return Collective(name=name, group=group, number=number)


def test_the_rank_that_did_not_come_is_named() -> None:
    text = describe_hang(
        beats={rank: beat(Phase.DATA if rank == 2 else Phase.FORWARD_BACKWARD) for rank in range(4)},
        dumps={0: [came(9)], 1: [came(9)], 2: [came(8)], 3: [came(9)]},
        states={},
        asked=range(4),
    )
    assert text == (
        "rank 2 hangs (step 7, waiting for data); ranks 0, 1, 3 wait in nccl:all_gather (number 9 of all ranks) "
        "(step 7, forward and backward pass)"
    )


def test_a_rank_that_is_behind_because_it_waits_elsewhere_does_not_hang() -> None:
    """HSDP: 3 has not come to its shard group's collective, so 2 waits there and is itself missed by 0 and 1."""
    shards, replicas = ("5", "mesh_dp_shard_cp"), ("6", "mesh_dp_replicate")
    dumps = {
        0: [came(4, group=("4", "mesh_dp_shard_cp")), came(3, "nccl:all_reduce", replicas)],
        1: [came(4, group=("4", "mesh_dp_shard_cp")), came(3, "nccl:all_reduce", ("7", "mesh_dp_replicate"))],
        2: [came(2, "nccl:all_reduce", replicas), came(4, group=shards)],
        3: [came(2, "nccl:all_reduce", ("7", "mesh_dp_replicate")), came(3, group=shards)],
    }
    text = describe_hang(
        beats={rank: beat(Phase.FORWARD_BACKWARD) for rank in range(4)}, dumps=dumps, states={}, asked=range(4)
    )
    hangs, *waits = text.split("; ")
    assert hangs == "rank 3 hangs (step 7, forward and backward pass)"
    assert waits == [
        "ranks 0, 1 wait in nccl:all_reduce (number 3 of group mesh_dp_replicate) (step 7, forward and backward pass)",
        "rank 2 waits in nccl:all_gather (number 4 of group mesh_dp_shard_cp) (step 7, forward and backward pass)",
    ]


def test_a_rank_that_does_not_answer_is_named_with_what_the_kernel_says() -> None:
    beats = {0: beat(Phase.OPTIMIZER), 1: beat(Phase.CHECKPOINT), 2: beat(Phase.OPTIMIZER)}
    text = describe_hang(
        beats=beats,
        dumps={0: [came(9)]},
        states={1: "waiting in the kernel, for a disk or a driver"},
        asked=[0, 1, 2],
    )
    assert text == (
        "rank 1 hangs (step 7, checkpoint, waiting in the kernel, for a disk or a driver); "
        "rank 2 hangs (step 7, optimizer, does not answer); "
        "rank 0 waits in nccl:all_gather (number 9 of all ranks) (step 7, optimizer)"
    )


def test_where_nothing_tells_ranks_apart_all_are_named() -> None:
    alone = describe_hang(beats={0: beat(Phase.DATA)}, dumps={0: []}, states={}, asked=[0])
    assert alone == "rank 0 hangs (step 7, waiting for data)"
    beats = {rank: beat(Phase.DEVICE) for rank in range(12)}
    text = describe_hang(beats=beats, dumps={rank: [came(3)] for rank in range(12)}, states={}, asked=range(12))
    assert text == (
        "ranks 0, 1, 2, 3, 4, 5, 6, 7, and 4 more hang (step 7, waiting for the device to end the step before)"
    )


def test_silent_ranks_of_another_machine_come_before_all() -> None:
    beats = {rank: beat(Phase.FORWARD_BACKWARD) for rank in range(4)}
    text = describe_hang(beats=beats, dumps={0: [came(3)], 1: [came(3)], 2: [came(3)]}, states={}, asked=[0, 1])
    assert text.startswith("rank 3 hangs (step 7, forward and backward pass, does not answer); ranks 0, 1, 2 wait in ")


def test_dumps_are_read_without_point_to_point_and_in_order_of_time(tmp_path: Path) -> None:
    def entry(number: int, group: tuple[str, str], time: int, p2p: bool = False) -> dict:
        kind = {"profiling_name": "gloo:all_reduce", "is_p2p": p2p, "time_created_ns": time}
        return kind | {"collective_seq_id": number, "process_group": list(group)}

    path = tmp_path / "rank_0.collectives.json"
    assert read_collectives(path) is None
    entries = [entry(2, ALL, 30), entry(1, ALL, 10), entry(5, ("1", "undefined"), 20), entry(9, ALL, 40, p2p=True)]
    path.write_text(json.dumps({"entries": entries}))
    found = read_collectives(path)
    assert found == [
        Collective(name="gloo:all_reduce", group=("1", "undefined"), number=5),
        Collective(name="gloo:all_reduce", group=ALL, number=2),
    ]
    assert [str(collective) for collective in found or []] == [
        "gloo:all_reduce (number 5 of group 1)",
        "gloo:all_reduce (number 2 of all ranks)",
    ]
    path.write_text('{"entries": [')
    assert read_collectives(path) is None


def test_a_rank_that_never_used_the_group_of_all_is_behind_in_it() -> None:
    (absence,) = find_absences({0: [came(1)], 1: []})
    assert absence == Absence(collective=came(1), waiting=(0,), absent=(1,))
    assert find_absences({0: [came(1, group=("4", "mesh_cp"))], 1: []}) == []
    assert find_absences({}) == []


def test_names_of_ranks() -> None:
    assert name_ranks([3], "hang") == "rank 3 hangs" and name_ranks([1, 5], "wait") == "ranks 1, 5 wait"


def test_a_process_says_nothing_unless_it_cannot_run() -> None:
    assert process_state(os.getpid()) == "" and process_state(2**22 + 1) == ""
