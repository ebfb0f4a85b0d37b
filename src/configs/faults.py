"""From merged values to a config: every fault found, each at its full key, in words, with its file or flag."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from configs.base import PATTERNS, TABLE_FAULTS
from configs.errors import ConfigError, Fault
from configs.layers import find_origin
from configs.nearest import did_you_mean, nearest_keys, nearest_word
from configs.safe_text import has_login
from configs.schema import ANYTHING, TAG, Key, Slot, dotted, item_slot, slots, table_tags
from configs.values import accepts, describe, explain_type, join_or, misfits_json, show

T = TypeVar("T", bound=BaseModel)

_MAX_HINTS = 20
"""Each takes milliseconds to find; a file of another program has hundreds of unknown keys."""

_MAX_HINTED = 80
"""A longer name resembles none of ours."""


def build_config(cls: type[T], values: dict[str, Any], origins: dict[Key, str]) -> T:
    """The config of these values.

    Raises:
        ConfigError: with all faults found. Faults between tables are only looked for once each table is sound.
    """
    walk = _Walk(root=cls, origins=origins)
    sound = walk.table(values, cls, ())
    walk.refuse_texts(values, ())
    try:
        config = cls.model_validate(sound)
    except ValidationError as error:
        faults = walk.faults + _pydantic_faults(cls, error, origins, walk.keys)
        raise ConfigError(faults) from None
    if walk.faults:
        raise ConfigError(walk.faults)
    return config


@dataclass
class _Walk:
    """Goes through the values beside the schema, keeps what is sound and notes a fault for what is not."""

    root: type[BaseModel]
    origins: dict[Key, str]
    faults: list[Fault] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)

    hints_given: int = 0

    def note(self, key: Key, message: str) -> None:
        self.keys.append(key)
        self.faults.append(Fault(key=dotted(key), message=message, origin=find_origin(self.origins, key)))

    def table(self, values: dict[str, Any], cls: type[BaseModel], above: Key, union: Slot | None = None) -> dict:
        sound = {}
        below = slots(cls)
        for name, value in values.items():
            key = (*above, name)
            if name not in below:
                self.note(key, self._unknown(key, cls, union))
            elif not accepts(below[name], value):
                misfits = misfits_json(value) if below[name].is_open and isinstance(value, dict) else []
                for inner, misfit in misfits:
                    self.note((*key, *inner), self._wrong_type(ANYTHING, misfit))
                if not misfits:
                    self.note(key, self._wrong_type(below[name], value))
            elif (kept := self._value(value, below[name], key)) is not None or value is None:
                sound[name] = kept
        return sound

    def refuse_texts(self, value: Any, key: Key) -> None:
        """Texts that no config may hold: logins, since a config is shown, kept in the run directory and sent to wandb;
        NUL, which no path and no other program takes."""
        if isinstance(value, (dict, list)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for name, item in items:
                self.refuse_texts(item, key if isinstance(value, list) else (*key, str(name)))
        elif isinstance(value, str) and has_login(value):
            message = (
                f"{show(value)} holds a login, which would be written into the run directory and logs; take it out and "
                "give it through the environment or ~/.netrc"
            )
            self.note(key, message)
        elif isinstance(value, str) and "\x00" in value:
            self.note(key, f"{show(value)} holds a NUL character")

    def _value(self, value: Any, slot: Slot, key: Key) -> Any:
        """The sound part of a value of the right type; None where nothing of it is."""
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            items = item_slot(slot)
            if items.tables:
                return [self._value(item, items, (*key, str(i))) for i, item in enumerate(value)]
        if not isinstance(value, dict) or not slot.tables:
            return value
        if slot.is_union and TAG not in value:
            if slot.default_tag is None:
                self.note((*key, TAG), f"is missing: {_options(slot)}")
                return None
            value = {TAG: slot.default_tag, **value}
        table = slot.table_for(value.get(TAG))
        if table is None:
            nearest = nearest_word(str(value[TAG])[:_MAX_HINTED], slot.tags)
            hint = did_you_mean([show(nearest)] if nearest else [])
            self.note((*key, TAG), f"expected {_options(slot)}, got {show(value[TAG])}{hint}")
            return None
        return self.table(value, table, key, slot if slot.is_union else None)

    def _unknown(self, key: Key, cls: type[BaseModel], union: Slot | None) -> str:
        owners = (
            [tag for table in union.tables if key[-1] in table.model_fields for tag in table_tags(table)]
            if union
            else []
        )
        if owners:
            own = " or ".join(map(show, table_tags(cls)))
            return f"is not a key of type = {own}; it belongs to type = {join_or([show(tag) for tag in owners])}"
        if self.hints_given >= _MAX_HINTS or len(key[-1]) > _MAX_HINTED:
            return "unknown key"
        self.hints_given += 1
        return f"unknown key{did_you_mean(nearest_keys(self.root, key, slots(cls)))}"

    def _wrong_type(self, slot: Slot, value: Any) -> str:
        message = explain_type(slot, value)
        if slot.tables and not isinstance(value, dict) and slot.optional:
            return f'{message} (a table, even an empty one, turns it on, "None" turns it off)'
        nearest = nearest_word(value[:_MAX_HINTED], _literals(slot)) if isinstance(value, str) else None
        return f"{message}{did_you_mean([show(nearest)] if nearest else [])}"


def _literals(slot: Slot) -> list[str]:
    return [option for member in slot.members for option in getattr(member, "__args__", ()) if isinstance(option, str)]


def _options(slot: Slot) -> str:
    return join_or([show(tag) for tag in slot.tags])


def _pydantic_faults(
    cls: type[BaseModel], error: ValidationError, origins: dict[Key, str], known: list[Key]
) -> list[Fault]:
    """The faults that pydantic found, without those that only follow from the `known` ones."""
    faults: dict[tuple[str, str], Fault] = {}
    entries = error.errors()
    # The walk has judged the types. Left are those of the other members of a union, which its value did not mean.
    judged = [entry for entry in entries if not entry["type"].endswith("_type")]
    for entry in judged or entries:
        key, slot = _locate(cls, entry["loc"])
        if any(key[: len(other)] == other or other[: len(key)] == key for other in known):
            continue
        context = entry.get("ctx", {})
        if entry["type"] == TABLE_FAULTS:
            found = [((*key, *fault.key.split(".")), fault.message) for fault in context["faults"]]
        else:
            found = [(key, _words(entry["type"], context, entry["input"], slot, entry["msg"]))]
        for full, message in found:
            # Each member of a plain union (a count or a fraction) reports the same fault.
            faults[dotted(full), message] = Fault(key=dotted(full), message=message, origin=find_origin(origins, full))
    return list(faults.values())


def _words(kind: str, context: dict[str, Any], value: Any, slot: Slot, message: str) -> str:
    """One pydantic error in plain words; its own message where there is no better one."""
    limits = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    phrases = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    if kind in limits:
        limit = context[limits[kind]]
        limit = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        return f"must be {phrases[limits[kind]]} {limit}, got {show(value)}"
    match kind:
        case "missing" if slot.is_union:
            return f"is missing: a table with type = {_options(slot)}"
        case "missing":
            return f"is missing: {describe(slot)}"
        case "finite_number":
            return f"must be a finite number, got {show(value)}"
        case "too_short":
            return f"needs at least {context['min_length']} entries, got {context['actual_length']}"
        case "string_too_short":
            return "must not be empty"
        case "string_pattern_mismatch":
            return f"{show(value)} may only have {PATTERNS[context['pattern']]}"
    return f"{message[:1].lower()}{message[1:]}, got {show(value)}"


def _locate(cls: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[Key, Slot]:
    """Full key and slot of a pydantic location, which also names the members of unions passed through."""
    slot, table = Slot(members=(cls,)), cls
    key: Key = ()
    skip_member = False
    for part in loc:
        if skip_member and isinstance(part, str):
            table = next((t for t in slot.tables if part in (*table_tags(t), t.__name__)), table)
            skip_member = False
            continue
        key = (*key, str(part))
        slot = item_slot(slot) if isinstance(part, int) else slots(table).get(part, Slot(members=()))
        table = slot.tables[0] if slot.tables else table
        skip_member = len(slot.members) > 1
    return key, slot
