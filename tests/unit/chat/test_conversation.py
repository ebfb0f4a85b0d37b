"""Rows in every known form become one form; what is not known is refused, what gives nothing has its reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.data import SFTDataConfig
from trainer.data.chat.read.conversation import LossRules, check_columns, read_conversation
from trainer.data.chat.sample import Conversation, UnusableError
from trainer.data.errors import DataError

ANSWERS = LossRules(roles=frozenset({"assistant"}), last_turn_only=False)
LAST = LossRules(roles=frozenset({"assistant"}), last_turn_only=True)
ASK = {"role": "user", "content": "how?"}
ANSWER = {"role": "assistant", "content": "so."}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"b": None, "a": [1]}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "ZQTOOL", "parameters": {"type": "object", "default": None, "a": {}}},
}


def read(row: dict[str, Any], rules: LossRules = ANSWERS) -> Conversation:
    before = json.dumps(row)
    read = read_conversation(row, rules)
    assert json.dumps(row) == before, "the row was changed"
    return read


def trains(*messages: dict[str, Any], rules: LossRules = ANSWERS) -> list[bool]:
    return read({"messages": list(messages)}, rules).trains


def fault(row: dict[str, Any], rules: LossRules = ANSWERS) -> str:
    with pytest.raises(DataError) as caught:
        read_conversation(row, rules)
    return str(caught.value)


def drop(row: dict[str, Any], rules: LossRules = ANSWERS) -> str:
    with pytest.raises(UnusableError) as caught:
        read_conversation(row, rules)
    return str(caught.value)


class TestColumns:
    @pytest.mark.parametrize(
        "row",
        [
            {"messages": [ASK, ANSWER]},
            {"messages": json.dumps([ASK, ANSWER]), "id": 3},
            {"conversations": [ASK, ANSWER], "messages": None},
            {"prompt": "how?", "completion": "so."},
            {"prompt": [ASK], "completion": [ANSWER]},
            {"prompt": "how?", "completion": [ANSWER], "tools": None},
            # A prompt beside messages repeats their beginning.
            {"messages": [ASK, ANSWER], "prompt": "how?"},
        ],
    )
    def test_the_same_conversation_in_every_form(self, row: dict[str, Any]):
        expected = Conversation(messages=[ASK, ANSWER], tools=None, trains=[False, True])
        assert read(row) == expected

    def test_only_the_completion_carries_loss(self):
        row = {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER, ASK, ANSWER]}
        assert read(row).trains == [False, False, False, True, False, True]
        everything = LossRules(roles=frozenset({"user", "assistant"}), last_turn_only=False)
        assert read(row, everything).trains == [False, False, False, True, True, True]
        assert fault({"prompt": [{**ASK, "train": 1}], "completion": "x"}) == (
            "message 1 asks for loss, but is part of the prompt; only the completion can carry loss"
        )

    @pytest.mark.parametrize("row", [{"messages": []}, {"messages": None}, {"messages": "[]"}, {"conversations": []}])
    def test_no_messages(self, row: dict[str, Any]):
        """Field case R52: an empty conversation is dropped under its reason."""
        assert drop(row) == "no messages"

    def test_a_missing_column_names_the_columns_found(self):
        assert fault({"text": "a", "prompt": "b"}) == (
            "there is neither messages nor prompt with completion; the columns are 'text', 'prompt'"
        )
        assert fault({}).endswith("the columns are none")
        check_columns(["id", "prompt", "completion"])
        with pytest.raises(DataError, match="the columns are 'completion'"):
            check_columns(["completion"])

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"messages": {"role": "user"}}, "messages is an object, not a list"),
            ({"messages": 3}, "messages is a number, not a list"),
            ({"messages": "hello"}, "the text in messages cannot be read as JSON: unexpected"),
            ({"prompt": True, "completion": "x"}, "prompt is true, not a list"),
            ({"messages": ["hello"]}, "message 1 is text, not an object with role and content"),
            ({"messages": [ASK, None]}, "message 2 is null, not an object with role and content"),
            ({"messages": [ASK], "chat_template_kwargs": {"a": 1}}, "options of the template per row"),
        ],
    )
    def test_wrong_types(self, row: dict[str, Any], message: str):
        assert fault(row).startswith(message)


class TestMessages:
    def test_null_keys_are_dropped_and_others_kept(self):
        message = {"role": "assistant", "content": "a", "name": None, "tool_calls": None, "reasoning_content": "r"}
        (read_back,) = read({"messages": [message]}).messages
        assert read_back == {"role": "assistant", "content": "a", "reasoning_content": "r"}
        tool = {"role": "tool", "content": "4", "tool_call_id": "abc", "name": "add", "weight": None}
        assert read({"messages": [tool, ANSWER]}).messages[0] == {
            "role": "tool",
            "content": "4",
            "tool_call_id": "abc",
            "name": "add",
        }

    @pytest.mark.parametrize("absent", [{"content": None}, {"content": ""}, {"content": []}, {}])
    def test_content_that_is_not_there_is_the_empty_text(self, absent: dict[str, Any]):
        """Field case R40: content None, "" and absent are the same message."""
        call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1}}], **absent}
        read_back = read({"messages": [ASK, call]})
        assert read_back.messages[1]["content"] == "" and read_back.trains == [False, True]

    def test_parts_of_text_become_text(self):
        parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
        assert read({"messages": [{"role": "user", "content": parts}, ANSWER]}).messages[0]["content"] == "a b"

    def test_developer_and_later_system_messages_stay(self):
        """Field case R42: no message goes missing before the template sees it."""
        messages = [{"role": "developer", "content": "ZQ1"}, ASK, {"role": "system", "content": "ZQ2"}, ANSWER]
        read_back = read({"messages": messages})
        assert read_back.messages == messages and read_back.trains == [False, False, False, True]

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            ({"role": "human", "content": "a"}, "has the unknown role 'human' ('user' here); roles are system, "),
            ({"role": "critic", "content": "a"}, "has the unknown role 'critic'; roles are system, developer, user, "),
            ({"content": "a", "id": 3}, "has no role; its keys are 'content', 'id'"),
            ({"role": ["user"], "content": "a"}, "has a list as its role, not text"),
            ({"from": "human", "value": "a"}, "has from and value (ShareGPT's form); rename them to role (human: "),
            ({"role": "user", "content": {"a": 1}}, "has an object as its content, not text; write it as a JSON "),
            ({"role": "user", "content": 1.5}, "has a number as its content, not text"),
            ({"role": "user", "content": [{"type": "image"}]}, "has a part of type 'image' in its content; only"),
            ({"role": "user", "content": [{"type": "text"}]}, "has a part without text in its content; only"),
            ({"role": "user", "content": ["a"]}, "has a part that is text in its content; only"),
            ({"role": "assistant", "content": "", "reasoning_content": 3}, "has a number as its reasoning_content, "),
            ({"role": "assistant", "content": "", "thinking": ["a"]}, "has a list as its thinking, not text"),
            ({"role": "assistant", "function_call": {"name": "f"}}, "has a function_call; write it as tool_calls"),
            ({"role": "user", "tool_calls": [{"name": "f"}]}, "has tool_calls, but its role is user"),
            ({"role": "user", "content": "a", "weight": 0.5}, "has '0.5' as its weight; 0 and 1 are possible"),
            ({"role": "user", "content": "a", "train": "yes"}, "has 'yes' as its train; 0 and 1 are possible"),
            ({"role": "user", "content": "a", "train": 1, "weight": 0}, "has a train and a weight that contradict "),
        ],
    )
    def test_unknown_forms_are_refused(self, message: dict[str, Any], words: str):
        assert fault({"messages": [ANSWER, message]}).startswith(f"message 2 {words}")


class TestToolCalls:
    @pytest.mark.parametrize(
        "calls",
        [
            [{"name": "f", "arguments": {"b": None, "a": [1]}}],
            [{"name": "f", "arguments": '{"b": null, "a": [1]}'}],
            [{"type": "function", "name": "f", "arguments": {"b": None, "a": [1]}}],
            [{"function": {"arguments": '{"b": null, "a": [1]}', "name": "f"}, "id": None}],
            '[{"name": "f", "arguments": {"b": null, "a": [1]}}]',
        ],
    )
    def test_the_same_call_in_every_form(self, calls: Any):
        """Field case R40: a call is the same with arguments as an object and as a string; explicit nulls and the
        order of keys stay."""
        (message,) = read({"messages": [{"role": "assistant", "tool_calls": calls}]}).messages
        assert message == {"role": "assistant", "tool_calls": [CALL], "content": ""}
        function = message["tool_calls"][0]["function"]
        assert list(function) == ["name", "arguments"] and list(function["arguments"]) == ["b", "a"]

    def test_the_id_stays(self):
        call = {"id": "c1", "function": {"name": "f", "arguments": "", "strict": True}, "index": 0}
        (message,) = read({"messages": [{"role": "assistant", "tool_calls": [call]}]}).messages
        assert message["tool_calls"] == [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}, "strict": True}, "index": 0}
        ]

    def test_an_empty_list_is_no_call(self):
        (message,) = read({"messages": [{**ANSWER, "tool_calls": []}]}).messages
        assert message == ANSWER

    @pytest.mark.parametrize(
        ("calls", "words"),
        [
            ({"name": "f"}, "has an object as its tool_calls, not a list"),
            (["f"], "has a tool call that is text, not an object"),
            ([{"arguments": {}}], "has a tool call without the name of a function"),
            ([{"function": "f"}], "has a tool call whose function is text, not an object"),
            ([{"name": "f", "arguments": "{"}], "has arguments of its call of 'f' that cannot be read as JSON: "),
            ([{"name": "f", "arguments": "[1]"}], "has a list as the arguments of its call of 'f', not an object"),
            ([{"name": "f", "parameters": {}}], "has a call of 'f' with parameters; arguments is the key for them"),
        ],
    )
    def test_calls_that_cannot_be_read(self, calls: Any, words: str):
        message = fault({"messages": [ASK, {"role": "assistant", "tool_calls": calls}]})
        assert message.startswith(f"message 2 {words}")


class TestTools:
    @pytest.mark.parametrize("column", ["tools", "tool_defs"])
    def test_the_same_tool_in_every_form(self, column: str):
        """Field case R41: the tools of a row are not lost."""
        function = TOOL["function"]
        flat_text = {"name": "ZQTOOL", "parameters": json.dumps(function["parameters"])}
        for tools in (
            [TOOL],
            [function],
            [{"type": "function", **function}],
            [flat_text],
            [json.dumps(TOOL)],
            json.dumps([function]),
        ):
            row = {"messages": [ASK, ANSWER], column: tools}
            assert json.dumps(read(row).tools) == json.dumps([TOOL])

    @pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": [], "tool_defs": None}, {"tools": "[]"}])
    def test_no_tools(self, tools: dict[str, Any]):
        assert read({"messages": [ASK, ANSWER], **tools}).tools is None

    @pytest.mark.parametrize(
        ("tools", "message"),
        [
            ({"tools": {"name": "f"}}, "tools is an object, not a list"),
            ({"tools": "f"}, "the text in tools cannot be read as JSON: unexpected"),
            ({"tools": [3]}, "a tool is a number, not an object"),
            ({"tools": [{"type": "web_search"}]}, "a tool has neither name nor function"),
            ({"tools": [{"function": {}}]}, "the function of a tool is no object with a name"),
            ({"tools": [{"name": "f", "parameters": "x"}]}, "the parameters of tool 'f' cannot be read as JSON: "),
            ({"tools": [{"name": "f"}], "tool_defs": [{"name": "f"}]}, "both tools and tool_defs are given"),
        ],
    )
    def test_tools_that_cannot_be_read(self, tools: dict[str, Any], message: str):
        assert fault({"messages": [ASK, ANSWER], **tools}).startswith(message)


class TestLoss:
    def test_roles_of_the_config(self):
        config = SFTDataConfig.model_validate({"name": "a/b", "loss_mask": {"system": True, "assistant": False}})
        assert LossRules.of(config) == LossRules(roles=frozenset({"system", "developer"}), last_turn_only=False)
        config = SFTDataConfig.model_validate(
            {"name": "a/b", "last_turn_only": True, "loss_mask": {"user": True, "tool": True}}
        )
        assert LossRules.of(config) == LossRules(roles=frozenset({"user", "assistant", "tool"}), last_turn_only=True)

    @pytest.mark.parametrize("key", ["train", "weight"])
    def test_a_message_decides_for_itself(self, key: str):
        got = read({"messages": [{**ASK, key: 1}, {**ANSWER, key: 0.0}, {**ASK, key: False}, {**ANSWER, key: True}]})
        assert got.trains == [True, False, False, True]
        assert got.messages == [ASK, ANSWER, ASK, ANSWER], "templates do not see the switch"
        assert trains({**ASK, key: None}, ANSWER) == [False, True]

    def test_last_turn_only(self):
        """Field case R37: of three turns only the last answer carries loss."""
        assert trains(ASK, ANSWER, ASK, ANSWER, ASK, ANSWER, rules=LAST) == [False] * 5 + [True]
        assert trains(ASK, ANSWER, ASK, {**ANSWER, "weight": 0}, rules=LAST) == [False, True, False, False]
        assert trains(ANSWER, {**ASK, "train": 1}, rules=LAST) == [False, True]

    @pytest.mark.parametrize(
        "empty",
        [{"content": ""}, {"content": None}, {}, {"content": " \n"}, {"content": "", "reasoning_content": "\n"}],
    )
    def test_an_empty_answer_does_not_train(self, empty: dict[str, Any]):
        """Field case R52: an assistant message that says nothing carries no loss, and alone it is dropped."""
        silent = {"role": "assistant", **empty}
        assert trains(ASK, ANSWER, ASK, silent) == [False, True, False, False]
        assert trains(ASK, ANSWER, ASK, silent, rules=LAST) == [False, True, False, False]
        assert trains(ANSWER, {**silent, "train": 1}) == [True, False]
        assert drop({"messages": [ASK, silent]}) == "empty answer"
        assert drop({"prompt": "how?", "completion": ""}) == "empty answer"

    @pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
    def test_reasoning_is_an_answer(self, key: str):
        assert trains(ASK, {"role": "assistant", "content": "", key: "hm"}) == [False, True]

    def test_nothing_that_carries_loss(self):
        assert drop({"messages": [ASK, {**ANSWER, "train": 0}]}) == "no message carries loss"
        assert drop({"messages": [ASK]}) == "no message carries loss"
        assert drop({"prompt": "how?", "completion": None}) == "no message carries loss"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=4,
)
CALLS = st.lists(st.fixed_dictionaries({}, optional={"name": JSON, "arguments": JSON, "function": JSON}), max_size=2)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | JSON, "content": st.text(max_size=3) | JSON},
    optional={"tool_calls": CALLS | JSON, "train": JSON, "weight": JSON, "reasoning_content": JSON},
)
COLUMN = st.lists(MESSAGES, max_size=3) | JSON
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "messages": COLUMN,
        "conversations": COLUMN,
        "prompt": COLUMN,
        "completion": COLUMN,
        "tools": JSON | st.lists(st.dictionaries(st.sampled_from(["name", "function", "parameters"]), JSON)),
    },
)


@given(ROWS | st.dictionaries(st.text(max_size=5), JSON))
def test_any_row_is_read_dropped_or_refused(row: dict[str, Any]):
    try:
        conversation = read_conversation(row, LAST)
    except (UnusableError, DataError):
        return
    assert len(conversation.messages) == len(conversation.trains) and sum(conversation.trains) == 1
    for message in conversation.messages:
        assert isinstance(message["content"], str) and None not in message.values()
        assert not {"train", "weight"} & message.keys()
