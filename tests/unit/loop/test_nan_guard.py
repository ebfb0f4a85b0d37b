from configs.checkpoint import NanGuardConfig
from trainer.nan_guard import NanGuard, SpikeMeter


def feed(guard: NanGuard, start: int, updated: list[bool]) -> list[str]:
    return [guard.observe(start + i, updated=ok, loss_finite=ok) for i, ok in enumerate(updated)]


def test_verdicts():
    """Field case R94: so many bad steps in a row, and the run goes back or ends."""
    guard = NanGuard(NanGuardConfig(max_consecutive=3, max_rewinds=1))
    assert feed(guard, 0, [True, False, False, True, False, False, False]) == ["go on"] * 6 + ["rewind"]
    assert (guard.first_bad, guard.skipped_steps, guard.nan_count) == (4, 5, 5)
    guard.rewound()
    assert guard.first_bad is None
    assert feed(guard, 4, [False, False, False]) == ["go on", "go on", "stop"]


def test_state_goes_on_in_the_middle_of_a_series():
    guard = NanGuard(NanGuardConfig(max_consecutive=3, max_rewinds=0))
    feed(guard, 0, [False, False])
    other = NanGuard(NanGuardConfig(max_consecutive=3, max_rewinds=0))
    other.load_state_dict(guard.state_dict())
    assert feed(other, 2, [False]) == ["stop"]
    assert other.skipped_steps == 3


def test_empty_step_is_skipped_but_no_nan():
    guard = NanGuard(NanGuardConfig(max_consecutive=3))
    guard.observe(0, updated=False, loss_finite=True)
    assert (guard.skipped_steps, guard.nan_count) == (1, 0)


def test_spike_meter():
    meter = SpikeMeter(window=4)
    assert [meter.observe(value) for value in (1.0, 3.0, 1.0, 3.0)] == [0.0] * 4
    assert meter.observe(5.0) == 3.0
    nan = meter.observe(float("nan"))
    assert nan != nan
    other = SpikeMeter(window=4)
    other.load_state_dict(meter.state_dict())
    assert other.observe(2.0) == meter.observe(2.0)
