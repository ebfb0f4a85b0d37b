"""Times of single ranks in one maximum."""

import torch

from trainer.metrics import MetricsAccumulator
from trainer.parallel.mesh import one_rank_mesh
from trainer.stragglers import _RANKS, RankTimes, _decode, _encode, add_times, read_times


def test_one_maximum_finds_the_time_and_whose_it_is() -> None:
    times = {0: 1.25, 1000: 1.250001, 7: 0.75}
    assert _decode(max(_encode(seconds, rank) for rank, seconds in times.items())) == (1.250001, 1000)
    assert _decode(_encode(7200.123456, _RANKS - 1)) == (7200.123456, _RANKS - 1)
    assert _decode(_encode(0.0, 0)) == (0.0, 0)


def test_the_metrics_of_one_rank() -> None:
    stats = MetricsAccumulator(one_rank_mesh(torch.device("cpu")))
    add_times(stats, RankTimes(step=0.5, update=0.125), 0)
    assert read_times(stats.reduce().read(), world_size=1) == {
        "time/step/max": 0.5,
        "time/step/mean": 0.5,
        "time/step/slowest_rank": 0,
        "time/update/max": 0.125,
        "time/update/mean": 0.125,
        "time/update/slowest_rank": 0,
    }
    assert read_times({}, world_size=1) == {}
