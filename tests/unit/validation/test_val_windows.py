import numpy as np

from trainer.validation.windows import cut_windows


def test_windows_of_each_document_are_disjoint_and_start_at_its_first_token() -> None:
    windows = cut_windows(np.array([5, 6, 14]), 4, prefix=False)
    # documents [0, 5), [5, 6), [6, 14): windows 0-4, 4-5 (one token: nothing to score), 5-6 (the same), 6-10, 10-14
    assert windows.starts.tolist() == [0, 6, 10]
    assert windows.num_inputs.tolist() == [3, 3, 3]
    assert windows.num_unscorable == 1


def test_with_a_prefix_every_window_is_scored_whole() -> None:
    windows = cut_windows(np.array([5, 6, 14]), 4, prefix=True)
    assert windows.starts.tolist() == [0, 4, 5, 6, 10]
    assert windows.num_inputs.tolist() == [4, 1, 1, 4, 4]
    assert windows.num_unscorable == 0
