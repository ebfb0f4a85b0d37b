"""Message text that spells a control token, tokenised as the ordinary text it is.

The tokenizers library can leave its control tokens unrecognised, but only all of them. So those that are meant are
swapped for a mark, which is an added token that is no control token: it cuts the text as they do. The text is then
tokenised as a whole, and each mark gives way to the token it stands for.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.errors import DataError
from trainer.text import listed

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_MARK = "\ufdd0\ufdd1"
"""Two of Unicode's noncharacters, which are kept for uses like this one and are in no text."""

_FILLER = "x"


class LiteralEncoder:
    """Tokenises texts some parts of which are not what they spell."""

    def __init__(self, backend: "Tokenizer") -> None:
        """
        Args:
            backend: without post-processor; not changed.
        """
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}

    @cached_property
    def _marked(self) -> "Tokenizer":
        from tokenizers import AddedToken, Tokenizer

        marked = Tokenizer.from_str(self._backend.to_str())
        marked.add_tokens([AddedToken(_MARK, special=False, normalized=False)])
        marked.encode_special_tokens = True
        return marked

    def encode(self, text: str, literal_spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """
        Args:
            literal_spans: [start, stop), ascending, apart: here nothing is a control token.

        Returns:
            (tokens,) int32 ids, and (tokens,) int64 starts and ends of their text

        Raises:
            DataError: the tokenizer makes control tokens of them all the same.
        """
        masked = _fill(text, literal_spans)
        plain = self._backend.encode(masked, add_special_tokens=False)
        meant = self._control_tokens(plain, masked)
        ids, _, _ = self._encode_marked(masked, meant)
        if ids.tolist() != plain.ids:
            # A control token that is found in another way than by its plain text.
            raise self._refusal(text, literal_spans)
        ids, starts, ends = self._encode_marked(text, meant)
        literal = np.zeros(len(text) + 1, bool)
        for start, stop in literal_spans:
            literal[start:stop] = True
        for number in np.flatnonzero(np.isin(ids, list(self._special)) & literal[starts]):
            if text[starts[number] : ends[number]].strip() == self._special[int(ids[number])].strip():
                raise self._refusal(text, literal_spans)
        return ids, starts, ends

    def _control_tokens(self, encoding: "Encoding", text: str) -> list[tuple[int, int, int]]:
        """(start, stop, id) of the control tokens that the text spells. What is unknown may have the id of one too."""
        return [
            (start, stop, number)
            for number, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            if number in self._special and text[start:stop].strip() == self._special[number].strip()
        ]

    def _encode_marked(self, text: str, meant: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `encode`, with the control tokens to be found in `text`."""
        pieces, mark_ends, shifts, position, length = [], [], [0], 0, 0
        for start, stop, _ in meant:
            pieces += [text[position:start], _MARK]
            length += start - position + len(_MARK)
            position = stop
            mark_ends.append(length)
            shifts.append(stop - length)
        encoding = self._marked.encode("".join([*pieces, text[position:]]), add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        marks = np.flatnonzero(ids == self._marked.token_to_id(_MARK))
        if marks.size != len(meant):
            raise DataError("holds the characters U+FDD0 and U+FDD1, which are no text")
        ids[marks] = [number for _, _, number in meant]
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        places += np.array(shifts)[np.searchsorted(mark_ends, places, "right")]
        return ids, places[:, 0], places[:, 1]

    def _refusal(self, text: str, literal_spans: list[tuple[int, int]]) -> DataError:
        spelled = listed(list(dict.fromkeys(repr(text[start:stop]) for start, stop in literal_spans)))
        return DataError(
            f"spells {spelled}, and the tokenizer cannot be told to read that as ordinary text; change the text"
        )


def _fill(text: str, spans: list[tuple[int, int]]) -> str:
    """`text` with harmless letters in place of the spans."""
    pieces, position = [], 0
    for start, stop in spans:
        pieces += [text[position:start], _FILLER * (stop - start)]
        position = stop
    return "".join([*pieces, text[position:]])
