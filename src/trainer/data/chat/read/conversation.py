"""From a raw row to a `Conversation`: the columns that hold messages and tools, and which messages carry loss.

A row has `messages`, or `conversations` in the same form, or `prompt` and `completion`; the first of them that is not
null counts. It runs once per row in the processes that tokenise, so plain messages are passed on as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.data import ChatConfig
from trainer.data.chat.read.messages import from_json, is_empty_answer, read_message, read_tool
from trainer.data.chat.sample import Conversation, UnusableError
from trainer.data.errors import DataError
from trainer.data.tables.json_text import describe
from trainer.text import listed

_COLUMNS = ("messages", "conversations", "prompt", "completion", "tools", "tool_defs", "chat_template_kwargs")
"""All that is read of a row."""

NO_MESSAGES = "no messages"
EMPTY_ANSWER = "empty answer"
NO_LOSS = "no message carries loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRules:
    """Which messages carry loss where they don't say so themselves."""

    roles: frozenset[str]
    last_turn_only: bool

    @classmethod
    def of(cls, config: ChatConfig) -> "LossRules":
        mask = config.loss_mask
        roles = {"user": mask.user, "assistant": mask.assistant, "tool": mask.tool}
        roles |= {"system": mask.system, "developer": mask.system}
        return cls(roles=frozenset(role for role, on in roles.items() if on), last_turn_only=config.last_turn_only)


def read_conversation(row: Mapping[str, Any], rules: LossRules) -> Conversation:
    """The conversation of a row.

    A message's own `train` or `weight` goes before the roles of `rules`; the messages of a `prompt` never carry loss,
    nor does an assistant message that says nothing. Explicit nulls inside the arguments of tool calls stay.

    Raises:
        UnusableError: there are no messages, or none of them carries loss.
        DataError: the row has no known form.
    """
    given, prompt_length = _find_messages(row)
    if not given:
        raise UnusableError(NO_MESSAGES)
    messages, trains = [], []
    answers = empty_answers = 0
    for number, raw in enumerate(given):
        try:
            message, wish = read_message(raw)
            if number < prompt_length and wish:
                raise DataError("asks for loss, but is part of the prompt; only the completion can carry loss")
        except DataError as error:
            raise DataError(f"message {number + 1} {error}") from None
        wanted = message["role"] in rules.roles if wish is None else wish
        if wanted and number >= prompt_length:
            answers += 1
            if is_empty_answer(message):
                empty_answers += 1
                wanted = False
        messages.append(message)
        trains.append(wanted and number >= prompt_length)
    tools = _find_tools(row)
    if answers == empty_answers:
        raise UnusableError(EMPTY_ANSWER if answers else NO_LOSS)
    if rules.last_turn_only:
        last = len(trains) - 1 - trains[::-1].index(True)
        trains = [number == last for number in range(len(trains))]
    return Conversation(messages=messages, tools=tools, trains=trains)


def read_columns(columns: list[str], table: str) -> list[str]:
    """The columns that are read of a table.

    Raises:
        DataError: naming the table, where its rows cannot be conversations.
    """
    try:
        check_columns(columns)
    except DataError as error:
        raise DataError(f"{table}: {error}") from None
    return [column for column in columns if column in _COLUMNS]


def check_columns(columns: list[str]) -> None:
    """Refuse rows that cannot be conversations.

    Raises:
        DataError: naming the columns.
    """
    if "messages" in columns or "conversations" in columns or {"prompt", "completion"} <= set(columns):
        return
    found = listed([repr(column) for column in columns], most=12) or "none"
    raise DataError(f"there is neither messages nor prompt with completion; the columns are {found}")


def _find_messages(row: Mapping[str, Any]) -> tuple[list[Any], int]:
    """The messages as the row has them, and how many of them are a prompt."""
    for column in ("messages", "conversations"):
        value = row.get(column)
        if value is not None:
            return _as_list(value, column), 0
    check_columns(list(row))
    prompt = _turn(row, "prompt", "user")
    return prompt + _turn(row, "completion", "assistant"), len(prompt)


def _turn(row: Mapping[str, Any], column: str, role: str) -> list[Any]:
    value = row.get(column)
    if value is None:
        return []
    return [{"role": role, "content": value}] if isinstance(value, str) else _as_list(value, column)


def _as_list(value: Any, column: str) -> list[Any]:
    value = from_json(value, f"the text in {column}") if isinstance(value, str) else value
    if not isinstance(value, list):
        raise DataError(f"{column} is {describe(value)}, not a list")
    return value


def _find_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if row.get("chat_template_kwargs"):
        raise DataError("options of the template per row (chat_template_kwargs) are not supported; use [renderer]")
    given = [column for column in ("tools", "tool_defs") if row.get(column)]
    if not given:
        return None
    if len(given) > 1:
        raise DataError("both tools and tool_defs are given; leave one of them out")
    return [read_tool(tool) for tool in _as_list(row[given[0]], given[0])] or None
