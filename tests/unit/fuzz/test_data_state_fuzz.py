"""The data's part of a checkpoint's state.json, whatever JSON it holds."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from trainer.data.fake import FakeSource
from trainer.data.loader import RowLoader
from trainer.data.stream import differences

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
spans = st.lists(st.tuples(st.integers(-5, 3000), st.integers(-5, 3000)).map(list), max_size=4)


def make_loader() -> RowLoader:
    source = FakeSource(seq_len=4, vocab_size=50, seed=0, num_rows=100, length="fixed", input_ids="random")
    return RowLoader(source, batch_size=4, micro_batch_size=2, dp_rank=0, dp_size=1, num_workers=0, pin_memory=False)


@given(st.fixed_dictionaries({}, optional={"epoch": values, "index": values, "skips": values | spans}))
def test_any_position(changes: dict[str, Any]) -> None:
    """Either a fault at `resume`, or a position that rows can be read at and that is saved again."""
    loader = make_loader()
    state = loader.state_dict(3) | changes
    try:
        loader.load_state_dict(state, 3)
    except ConfigError as error:
        assert [fault.key for fault in error.faults] == ["resume"]
        return
    assert loader.step(3).micro_batches[0].num_tokens == 8
    saved = loader.state_dict(3)
    assert saved["epoch"] >= 0 and 0 <= saved["index"] < 100


@given(values)
def test_any_fingerprint_of_another_run_is_refused(fingerprint: Any) -> None:
    loader = make_loader()
    try:
        loader.load_state_dict(loader.state_dict(3) | {"fingerprint": fingerprint}, 3)
    except ConfigError as error:
        assert len(error.faults[0].message) < 4000
        return
    raise AssertionError("taken for the same data")


def test_two_types_of_data_are_named_and_nothing_else() -> None:
    """It was the whole pool as a dict."""
    pool = {"shards": 3, "tokens": 70, "contents": "00ff"}
    old = {"type": "tokens", "seed": 0, "pool": pool, "tokenizer": {"name": "tiny"}}
    new = {"type": "fake", "seed": 0, "vocab_size": 50}
    assert differences(old, new) == ["type was tokens and is fake"]
    assert differences({"pool": pool}, {}) == ["pool was a table and is missing"]
    assert differences({"pool": pool}, {"pool": pool | {"tokens": 71}}) == ["pool.tokens was 70 and is 71"]
    assert differences({"a": "x" * 1000}, {"a": [1]}) == [f"a was {'x' * 80} and is a list"]
