"""Which rows a rank scores in which forward pass: by cost, so that in every pass all ranks finish together."""

import numpy as np

PADDING_ROW = -1


def deal(costs: np.ndarray, *, rows_per_forward: int, dp_size: int) -> np.ndarray:
    """Deal rows to passes and ranks.

    From the dearest row to the cheapest, one to each rank, then one to each in the opposite order, and so on. So the
    rows of a pass cost about the same, the ranks' shares of it too, and the pass that needs most comes first.

    Args:
        costs: (rows,) any number type; rows of equal cost keep their order.
        rows_per_forward: rows per rank and pass.
        dp_size: ranks.

    Returns:
        (passes, dp_size, rows_per_forward) int64 row numbers, each row once; PADDING_ROW where none is left.
    """
    passes = -(-len(costs) // (rows_per_forward * dp_size))
    hands = np.full((passes * rows_per_forward, dp_size), PADDING_ROW, np.int64)
    hands.flat[: len(costs)] = np.argsort(-costs, kind="stable")
    hands[1::2] = hands[1::2, ::-1].copy()
    return np.ascontiguousarray(hands.reshape(passes, rows_per_forward, dp_size).swapaxes(1, 2))
