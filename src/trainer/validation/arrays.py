"""`val.save_arrays`: what a round made of each document, as one parquet file per set and step."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trainer.errors import RunError
from trainer.files import write_whole
from trainer.validation.windows import DocumentScores


def write_arrays(path: Path, scores: Mapping[int, DocumentScores]) -> None:
    """Write the records of a set at all lengths, in this order: a row group for each length.

    Columns: seq_len int32, document int64, nats float64, tokens int64, bytes int64, correct bool, option_nats
    list<double>; the last two are null where a kind has none.

    Args:
        path: of the file; its folder is made. A file of that name is replaced.
        scores: by window length.

    Raises:
        RunError: it cannot be written, on a full disk for one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    options = pa.list_(pa.float64())
    schema = pa.schema(
        [
            ("seq_len", pa.int32()),
            ("document", pa.int64()),
            ("nats", pa.float64()),
            ("tokens", pa.int64()),
            ("bytes", pa.int64()),
            ("correct", pa.bool_()),
            ("option_nats", options),
        ]
    )
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, schema) as writer:
        for seq_len, records in scores.items():
            count = len(records.documents)
            columns = [
                pa.array(np.full(count, seq_len), pa.int32()),
                pa.array(records.documents, pa.int64()),
                pa.array(records.nats, pa.float64()),
                pa.array(records.num_tokens, pa.int64()),
                pa.array(records.num_bytes, pa.int64()),
                pa.nulls(count, pa.bool_()) if records.correct is None else pa.array(records.correct, pa.bool_()),
                pa.nulls(count, options) if records.option_nats is None else pa.array(records.option_nats, options),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    try:
        write_whole(path, out.getvalue().to_pybytes())
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror})") from error
