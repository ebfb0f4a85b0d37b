"""What can be wrong with data in files, before anybody has said which key of the config it stands for."""


class DataError(Exception):
    """A fault of the data that nobody should train or be scored over: the run is refused.

    The message says what is wrong and what to do; whoever knows the file and row puts them in front.
    """


class PlacedError(DataError):
    """A DataError whose message names the file and row already: one that came up in reading the row."""
