"""`[renderer]` and a tokenizer to compiled templates: every option is one that the template reads."""

from typing import TYPE_CHECKING, Any

import jinja2

from configs.errors import ConfigError, Fault
from configs.renderer import RendererConfig
from trainer.data.chat.render.marks import ChatTemplate
from trainer.text import first_line, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPTIONS = ("enable_thinking", "thinking", "preserve_thinking", "clear_thinking", "reasoning_effort")
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def open_templates(tokenizer: "PreTrainedTokenizerBase", config: RendererConfig) -> tuple[ChatTemplate, ChatTemplate]:
    """The template for rows without and with tools; most tokenizers have one for both.

    Raises:
        ConfigError: there is none, it is no Jinja, it does not read an option, or it wants a date.
    """
    plain, with_tools = _sources(tokenizer, config)
    variables = _variables(tokenizer, config)
    key = "tokenizer.name" if config.template is None else "renderer.template"
    templates = [_compile(source, variables, config, key) for source in dict.fromkeys((plain, with_tools))]
    _check_options(templates, config)
    if config.date is not None:
        # A date the template asks for by name and one it asks of the clock are the same day.
        for template in templates:
            if "date_string" in template.reads:
                template.variables.setdefault("date_string", config.date.strftime("%d %b %Y"))
    return templates[0], templates[-1]


def _sources(tokenizer: "PreTrainedTokenizerBase", config: RendererConfig) -> tuple[str, str]:
    if config.template is not None:
        try:
            source = config.template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError.one("renderer.template", f"{config.template} cannot be read: {reason}") from error
        return source, source
    own: Any = tokenizer.chat_template
    if isinstance(own, dict) and "default" in own:
        return own["default"], own.get("tool_use", own["default"])
    if isinstance(own, str) and own:
        return own, own
    reason = f"none is named default ({listed(list(own))})" if own else "it has none"
    raise ConfigError.one(
        "renderer.template", f"is missing: chats need a chat template, and of the tokenizer's own {reason}"
    )


def _variables(tokenizer: "PreTrainedTokenizerBase", config: RendererConfig) -> dict[str, Any]:
    return {**tokenizer.special_tokens_map, **_typed(config), **config.options}


def _typed(config: RendererConfig) -> dict[str, Any]:
    return {name: value for name in _OPTIONS if (value := getattr(config, name)) is not None}


def _compile(source: str, variables: dict[str, Any], config: RendererConfig, key: str) -> ChatTemplate:
    try:
        template = ChatTemplate(source, dict(variables), config.date)
    except jinja2.TemplateError as error:
        raise ConfigError.one(key, f"the chat template is no valid Jinja: {first_line(error)}") from error
    by_name = "date_string" in template.reads and "date_string" in variables
    if template.asks_date and config.date is None and not by_name:
        message = "is missing: the chat template writes today's date, and tokens must not change from day to day"
        raise ConfigError.one("renderer.date", message)
    return template


def _check_options(templates: list[ChatTemplate], config: RendererConfig) -> None:
    reads = frozenset[str]().union(*(template.reads for template in templates))
    known = listed(sorted(reads - _GIVEN), most=12) or "none"
    faults = []
    given = {f"renderer.{name}": name for name in _typed(config)}
    for key, name in {**given, **{f"renderer.options.{name}": name for name in config.options}}.items():
        if name in _GIVEN:
            faults.append(Fault(key=key, message="is what the data says, not an option"))
        elif name not in reads:
            faults.append(Fault(key=key, message=f"is not read by the chat template; the variables it reads: {known}"))
    if config.date is not None and "date_string" not in reads and not any(t.asks_date for t in templates):
        faults.append(Fault(key="renderer.date", message="is not read by the chat template, which writes no date"))
    if faults:
        raise ConfigError(faults)
