"""The shape of a config class, read from its pydantic fields: which keys there are and what may stand at each."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

TAG = "type"
"""The key that picks the variant of a union of tables."""

Key = tuple[str, ...]
"""A key as its parts: ("data", "seq_len")."""


def dotted(key: Key) -> str:
    return ".".join(key)


def flatten(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Values by full dotted key. Lists stay whole; an empty table is a value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{above}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return flat


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, `Annotated` stripped and nested unions opened; NoneType included."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return union_members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return tuple(member for part in get_args(annotation) for member in union_members(part))
    return (annotation,)


def is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """What may stand at one key."""

    members: tuple[Any, ...]
    """Types of the union without None; one for a plain field."""

    optional: bool = False
    required: bool = False
    default: Any = None
    doc: str = ""

    @property
    def tables(self) -> tuple[type[BaseModel], ...]:
        """The config classes among the members."""
        return tuple(member for member in self.members if is_table(member))

    @property
    def is_open(self) -> bool:
        """Any key may stand below (a dict, or a value below one)."""
        return any(member is Any or member is dict or get_origin(member) is dict for member in self.members)

    @property
    def is_list(self) -> bool:
        return any(get_origin(member) in (list, tuple) for member in self.members)

    @property
    def is_union(self) -> bool:
        """Several tables, told apart by `type`."""
        return len(self.tables) > 1

    @property
    def tags(self) -> tuple[str, ...]:
        """The names of all variants."""
        return tuple(tag for table in self.tables for tag in table_tags(table))

    def table_for(self, tag: Any) -> type[BaseModel] | None:
        """The table that stands here, given the value of its `type`; None for an unknown one."""
        if not self.is_union:
            return self.tables[0] if self.tables else None
        return next((table for table in self.tables if tag in table_tags(table)), None)

    @property
    def default_tag(self) -> str | None:
        """The variant that stands where no `type` is given: that of the union's default, or the one whose `type` has a
        default."""
        if not self.is_union:
            return None
        if isinstance(self.default, BaseModel):
            return getattr(self.default, TAG, None)
        fields = [table.model_fields.get(TAG) for table in self.tables]
        return next((field.default for field in fields if field is not None and not field.is_required()), None)


ANYTHING = Slot(members=(Any,))
"""Below a dict: any value."""


def table_tags(table: type[BaseModel]) -> tuple[str, ...]:
    """The values of `type` that pick this table."""
    field = table.model_fields.get(TAG)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def slot_of(annotation: Any, field: FieldInfo | None = None) -> Slot:
    """The slot of an annotation, with default and doc where it belongs to a field."""
    members = union_members(annotation)
    return Slot(
        members=tuple(member for member in members if member is not NoneType),
        optional=NoneType in members,
        required=field is not None and field.is_required(),
        default=None if field is None or field.is_required() else field.get_default(call_default_factory=True),
        doc="" if field is None else " ".join((field.description or "").split()),
    )


def slots(table: type[BaseModel]) -> dict[str, Slot]:
    """All keys of a table, in the order of its fields."""
    return {name: slot_of(field.annotation, field) for name, field in table.model_fields.items()}


def item_slot(slot: Slot) -> Slot:
    """What may stand in the lists that may stand here."""
    items = [item for m in slot.members if get_origin(m) in (list, tuple) for item in get_args(m) if item is not ...]
    parts = [slot_of(item) for item in items]
    return join_slots(parts) if parts else ANYTHING


def join_slots(parts: Iterable[Slot]) -> Slot:
    """One slot that takes what any of these takes (a key that several variants of a union have)."""
    parts = list(parts)
    members = tuple(dict.fromkeys(member for part in parts for member in part.members))
    return Slot(members=members, optional=any(part.optional for part in parts), default=parts[0].default)


def find_slot(root: type[BaseModel], key: Key) -> Slot | None:
    """The slot at a full key, in whichever variant has it; None if no variant does."""
    slot = Slot(members=(root,))
    for part in key:
        below = [fields[part] for table in slot.tables if part in (fields := slots(table))]
        if below:
            slot = join_slots(below)
        elif slot.is_open:
            slot = ANYTHING
        else:
            return None
    return slot


def all_keys(root: type[BaseModel], above: Key = ()) -> list[Key]:
    """Every key that can be given, tables and all variants included."""
    keys: dict[Key, None] = {}
    for name, slot in slots(root).items():
        key = (*above, name)
        keys[key] = None
        for table in slot.tables:
            keys.update(dict.fromkeys(all_keys(table, key)))
    return list(keys)
