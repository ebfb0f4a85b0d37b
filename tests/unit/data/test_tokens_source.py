"""`type = "tokens"`: windows, targets, segments and epochs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from configs.errors import ConfigError
from trainer.data.row import RowError, Rows
from trainer.data.shards import TokenPool
from trainer.data.tokens import TokensSource

WriteShard = Callable[..., Path]
MakeSource = Callable[..., TokensSource]
ReadRows = Callable[..., Rows]


def _numbered(write_shard: WriteShard, folder: Path, lengths: list[int], shards: int = 1) -> int:
    """Shards whose token at pool position i has id i."""
    documents, start = [], 0
    for length in lengths:
        documents.append(list(range(start, start + length)))
        start += length
    for number, part in enumerate(np.array_split(np.arange(len(documents)), shards)):
        write_shard(folder / f"{number:05d}.ds", [documents[i] for i in part], width=4)
    return start


def test_rows_by_hand(tmp_path: Path, write_shard: WriteShard, make_source: MakeSource, read_rows: ReadRows) -> None:
    """Field case R07: borders come from the index; no token has to look like an EOS."""
    _numbered(write_shard, tmp_path, [3, 5, 4, 1, 1, 7])
    source = make_source([tmp_path], 8, shuffle=False)
    rows = read_rows(source, epoch=4)
    assert (source.num_rows, source.left_out_tokens) == (2, 5)
    assert rows.input_ids.tolist() == [list(range(8)), list(range(8, 16))]
    assert rows.labels.tolist() == [list(range(1, 9)), list(range(9, 17))]
    assert [lengths.tolist() for lengths in rows.segment_lengths] == [[3, 5], [4, 1, 1, 2]]
    assert rows.num_padding.tolist() == [0, 0]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("document_masking", [True, False])
@pytest.mark.parametrize(
    ("lengths", "seq_len", "shards"),
    [([9], 8, 1), ([1] * 17, 16, 3), ([5, 6, 7], 3, 2), ([16, 16], 16, 2), ([33, 1, 2, 30], 16, 3), ([10, 7], 2, 1)],
)
def test_every_token_is_read_once(
    tmp_path: Path,
    write_shard: WriteShard,
    make_source: MakeSource,
    read_rows: ReadRows,
    lengths: list[int],
    seq_len: int,
    shards: int,
    document_masking: bool,
    shuffle: bool,
) -> None:
    """Each epoch reads each token once as input, but for the left-out ones; its target is the next of the ring."""
    total = _numbered(write_shard, tmp_path, lengths, shards)
    borders = set(np.cumsum(lengths).tolist())
    source = make_source([tmp_path], seq_len, document_masking=document_masking, shuffle=shuffle)
    assert source.num_rows == total // seq_len
    for epoch in range(4):
        rows = read_rows(source, epoch)
        assert np.unique(rows.input_ids).size == rows.input_ids.size == total - source.left_out_tokens
        assert np.array_equal(rows.labels, (rows.input_ids + 1) % total)
        for ids, segments in zip(rows.input_ids, rows.segment_lengths, strict=True):
            assert (segments > 0).all()
            assert segments.sum() == seq_len
            inner = [int(ids[end - 1]) + 1 for end in np.cumsum(segments)[:-1]]
            expected = [int(i) + 1 for i in ids[:-1] if int(i) + 1 in borders]
            assert inner == (expected if document_masking else [])


def test_epochs_start_elsewhere_and_go_another_way(
    tmp_path: Path, write_shard: WriteShard, make_source: MakeSource, read_rows: ReadRows
) -> None:
    """Field case R59: the order of each epoch is its own, the same whenever it is asked for."""
    total = _numbered(write_shard, tmp_path, [50, 51])
    source = make_source([tmp_path], 4)
    epochs = [read_rows(source, epoch).input_ids for epoch in range(8)]
    assert len({epoch.tobytes() for epoch in epochs}) == 8
    offsets = {int(np.setdiff1d(np.arange(total), epoch)[0]) for epoch in epochs}
    assert len(offsets) > 4, "the left-out token is another one each time"
    again = make_source([tmp_path], 4)
    assert np.array_equal(read_rows(again, 3).input_ids, epochs[3])
    assert np.array_equal(read_rows(again, 3, [7, 2]).input_ids, epochs[3][[7, 2]])
    other_seed = make_source([tmp_path], 4, seed=1)
    assert not np.array_equal(read_rows(other_seed, 3).input_ids, epochs[3])


def test_without_shuffle_every_epoch_is_in_order(
    tmp_path: Path, write_shard: WriteShard, make_source: MakeSource, read_rows: ReadRows
) -> None:
    _numbered(write_shard, tmp_path, [11])
    source = make_source([tmp_path], 5, shuffle=False)
    for epoch in (0, 3):
        assert read_rows(source, epoch).input_ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_loss_file_masks_targets(
    tmp_path: Path, write_shard: WriteShard, make_source: MakeSource, read_rows: ReadRows
) -> None:
    """Byte i speaks of token i as a target, so of the label before it; the first token is the last one's target."""
    write_shard(tmp_path / "00000.ds", [[10, 11, 12, 13], [14, 15, 16, 17]], loss=[0, 1, 0, 1, 1, 0, 1, 1])
    rows = read_rows(make_source([tmp_path], 4, shuffle=False), 0)
    assert rows.input_ids.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert rows.labels.tolist() == [[11, -100, 13, 14], [-100, 16, 17, -100]]


def test_too_few_tokens_says_both_numbers(tmp_path: Path, write_shard: WriteShard, make_source: MakeSource) -> None:
    """Field case R53: three documents of 10 tokens and seq_len 64."""
    _numbered(write_shard, tmp_path, [10, 10, 10])
    with pytest.raises(ConfigError) as caught:
        make_source([tmp_path], 64)
    assert caught.value.faults[0].key == "data.seq_len"
    assert "65 tokens" in caught.value.faults[0].message
    assert "only 30" in caught.value.faults[0].message
    with pytest.raises(ConfigError):
        make_source([tmp_path], 30)
    assert make_source([tmp_path], 29).num_rows == 1


@pytest.mark.parametrize("place", [0, 7, 8, 9, 15])
def test_ids_beyond_the_vocabulary(
    tmp_path: Path, write_shard: WriteShard, make_source: MakeSource, read_rows: ReadRows, place: int
) -> None:
    """Field case R47: id == vocab_size in a shard is an error on the CPU, with file and offset."""
    tokens = [5] * 16
    tokens[place] = 300
    write_shard(tmp_path / "00000.ds", [tokens[:8]])
    write_shard(tmp_path / "00001.ds", [tokens[8:]])
    assert read_rows(make_source([tmp_path], 8, vocab_size=301, shuffle=False), 0).input_ids.max() == 300
    with pytest.raises(RowError) as caught:
        read_rows(make_source([tmp_path], 8, vocab_size=300, shuffle=False), 0)
    file = tmp_path / f"0000{place // 8}.ds"
    assert str(caught.value) == f"{file}: token {place % 8} has id 300, but the model has only 300 embeddings"


def test_a_target_beyond_the_vocabulary_is_seen_over_the_wrap(
    tmp_path: Path, write_shard: WriteShard, make_source: MakeSource, read_rows: ReadRows
) -> None:
    write_shard(tmp_path / "00000.ds", [[300] + [5] * 15])
    source = make_source([tmp_path], 8, vocab_size=300, shuffle=False)
    with pytest.raises(RowError, match=r"00000\.ds: token 0 has id 300"):
        read_rows(source, 0, [1])


def test_chunk_shuffled_shards(
    tmp_path: Path, write_shard: WriteShard, make_source: MakeSource, read_rows: ReadRows
) -> None:
    """Their index mixes chunk ends with document ends, so documents cannot be told apart."""
    path = write_shard(tmp_path / "00000_00000_chunk_shuffled.ds", [[1, 2, 3, 0]] * 4)
    with pytest.raises(ConfigError) as caught:
        make_source([tmp_path], 4)
    assert caught.value.faults[0].key == "data.document_masking"
    assert str(path) in caught.value.faults[0].message
    source = make_source([tmp_path], 8, document_masking=False)
    assert source.full_rows
    assert [lengths.tolist() for lengths in read_rows(source, 0).segment_lengths] == [[8], [8]]


def test_a_damaged_index_names_its_file(
    tmp_path: Path, write_shard: WriteShard, make_source: MakeSource, read_rows: ReadRows
) -> None:
    path = write_shard(tmp_path / "00000.ds", [[1, 0]] * 8)
    np.array([2, 4, 12, 8, 10, 6, 14, 16], "<u8").tofile(f"{path}.index")
    with pytest.raises(RowError, match=r"00000\.ds\.index is damaged"):
        read_rows(make_source([tmp_path], 8), 0)


def test_description_counts_what_is_left_out(tmp_path: Path, write_shard: WriteShard, make_source: MakeSource) -> None:
    """Field case R49: the tokens that fill no row are counted and said."""
    _numbered(write_shard, tmp_path, [60, 40])
    assert make_source([tmp_path], 8).description == (
        "100 tokens in 2 documents: 12 rows of 8 per epoch, 4 tokens left out of each"
    )


def test_pool_reads_stay_inside_the_pool(tmp_path: Path, write_shard: WriteShard) -> None:
    _numbered(write_shard, tmp_path, [6])
    pool = TokenPool([tmp_path])
    for start, count in ((-1, 2), (5, 2), (6, 1)):
        with pytest.raises(IndexError):
            pool.read(start, count)
