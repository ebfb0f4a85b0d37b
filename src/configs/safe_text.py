"""Text made safe to show and to keep: no character that a terminal obeys, no secret."""

import os
import re
from collections.abc import Mapping

SECRET_NAME = re.compile(
    # Not every `..._token`: pad_token and its like are none.
    r"(^|_)(api_?key|access_?key|password|passwd|secret|credentials?|(api|hf|hub|auth|access|bearer)_?token)$|^token$",
    re.IGNORECASE,
)
"""What the key of a secret is called."""

_SECRET_VARIABLE = re.compile(
    r"((?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)token|(api|access|private|secret)_?key|passw(or)?d|secret|credentials?)$",
    re.IGNORECASE,
)
"""What an environment variable with a secret is called: here any token is one but those of a tokenizer."""

_LEAST_SECRET = 8
"""Shorter values (`HF_TOKEN=1`) would star out ordinary text, and are no secrets."""

_LOGIN = re.compile(r"(?<=://)[^/@\s\"']+(?=@)")


def printable(text: str) -> str:
    """The text with everything that a terminal obeys as an escape: control characters, changes of direction, lone
    surrogates. Line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else _escape(c) for c in text)


def one_line(text: str) -> str:
    """`printable`, with line ends and tabs as escapes too."""
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def star_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The text with *** for the login in a URL (`https://user:password@host`) and for the values of environment
    variables that are named like secrets: libraries put both into their error messages."""
    for name, value in environ.items():
        secret = value.strip()
        if len(secret) >= _LEAST_SECRET and _SECRET_VARIABLE.search(name):
            text = text.replace(secret, "***")
    return _LOGIN.sub("***", text)


_ASSIGNMENT = re.compile(r"""\b(\w+)=(?!["']?\$)["']?[^\s"';,]""")
"""Of a value that is written out, not `$(cat file)` or another variable."""


def has_secret(text: str) -> bool:
    """Shell text that writes a secret out: assigns it to a variable named like one, holds what such a variable of the
    environment holds, or the login in a URL."""
    assigned = any(_SECRET_VARIABLE.search(match[1]) for match in _ASSIGNMENT.finditer(text))
    return assigned or star_secrets(text) != text


def safe(text: str) -> str:
    """What may reach a terminal, a log or a report of a failure."""
    return printable(star_secrets(text))


def has_login(text: str) -> bool:
    """It holds a URL with a user name or password in it."""
    return _LOGIN.search(text) is not None
