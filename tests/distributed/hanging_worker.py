"""Two ranks of a gloo group, of which one never comes to the third collective. Arguments: folder, rank."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.flight_recorder import answer_dump_signals
from trainer.heartbeat import Heartbeat, Phase
from trainer.run import rank_collectives, rank_heartbeat, rank_log


def main(folder: Path, rank: int) -> None:
    """Hangs until it is killed."""
    log = rank_log(folder, 0, rank).open("a", buffering=1)
    answer_dump_signals(log, rank_collectives(folder, 0, rank))
    heartbeat = Heartbeat(rank_heartbeat(folder, 0, rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    values = torch.ones(2)
    for _ in range(2):
        dist.all_reduce(values)
    if rank == 1:
        heartbeat.beat(Phase.DATA, 3)
        sleep_in_the_data()
    heartbeat.beat(Phase.OPTIMIZER, 3)
    dist.all_reduce(values)


def sleep_in_the_data() -> None:
    """A name to find in the stacks."""
    time.sleep(300)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
