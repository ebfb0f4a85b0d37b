"""Layers of a config: files and flags put on top of each other, with a record of who gave what.

Values are plain (dicts, lists, scalars) until all layers are merged; only then does pydantic see them. The switching
of a union's variant has to happen here, while it is known which layer gave which key.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from configs.argv import FlagArgument
from configs.errors import Fault
from configs.schema import TAG, Key, Slot, dotted, slots
from configs.values import show


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Values from one file or from all flags together."""

    values: dict[str, Any]
    origins: dict[Key, str]
    """Who gave the values at and below a key; () is all of them."""


def file_layer(path: str, key: Key, values: dict[str, Any]) -> Layer:
    """The layer of one file, put under `key`."""
    for part in reversed(key):
        values = {part: values}
    return Layer(values=values, origins={(): path})


def flag_layer(flags: Iterable[FlagArgument]) -> tuple[Layer, list[Fault]]:
    """One layer of all flags, whatever their order, and a fault for each flag that contradicts an earlier one."""
    values: dict[str, Any] = {}
    origins: dict[Key, str] = {}
    faults = []
    for flag in flags:
        origin = f"flag {flag.flag}"
        clash = _put(values, flag.key, flag.value, (), origins)
        if clash is None:
            origins[flag.key] = origin
            continue
        earlier = find_origin(origins, clash).removeprefix("flag ")
        given = f"{flag.flag} is given twice" if earlier == flag.flag else f"{earlier} gives it too"
        hint = "; write all entries after one flag" if isinstance(flag.value, list) else ""
        faults.append(Fault(key=dotted(clash), message=f"{given}: which value holds is unclear{hint}", origin=origin))
    return Layer(values=values, origins=origins), faults


def _put(values: dict[str, Any], key: Key, value: Any, above: Key, origins: dict[Key, str]) -> Key | None:
    """Put a value into nested values; the key of the clash when something else stands there already."""
    name, *rest = key
    here = (*above, name)
    if rest:
        below = values.setdefault(name, {})
        return _put(below, tuple(rest), value, here, origins) if isinstance(below, dict) else here
    if name not in values:
        values[name] = value
        return None
    standing = values[name]
    if here in origins or not (isinstance(standing, dict) and isinstance(value, dict)):
        return here
    for item_name, item in value.items():
        clash = _put(standing, (item_name,), item, here, origins)
        if clash is not None:
            return clash
    return None


def find_origin(origins: dict[Key, str], key: Key) -> str:
    """Who gave the value at `key`: its own entry, else that of the nearest key above, else those of the keys below.

    "" where nobody did.
    """
    for length in range(len(key), -1, -1):
        if key[:length] in origins:
            return origins[key[:length]]
    return ", ".join(dict.fromkeys(origin for other, origin in origins.items() if other[: len(key)] == key))


@dataclass
class MergedLayers:
    """The layers so far."""

    root: type[BaseModel]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)
    """Who gave each value; for a table with no values in it, who gave that."""
    notes: list[str] = field(default_factory=list)
    """Keys dropped because their union changed its variant."""

    def add(self, layer: Layer) -> None:
        """Put a layer on top: tables merge, everything else replaces."""
        self._merge_table(self.values, layer.values, (), slots(self.root), layer)

    def _merge_table(
        self, target: dict[str, Any], incoming: dict[str, Any], above: Key, below: dict[str, Slot], layer: Layer
    ) -> None:
        for name, value in incoming.items():
            key = (*above, name)
            slot = below.get(name, Slot(members=()))
            if not isinstance(value, dict):
                self._forget(key)
                target[name] = value
                self.origins[key] = find_origin(layer.origins, key)
                continue
            standing = target.get(name, _start(slot) if name not in target else None)
            if not isinstance(standing, dict):
                self._forget(key)
                standing = {}
            target[name] = standing
            if not value and not any(known[: len(key)] == key for known in self.origins):
                self.origins[key] = find_origin(layer.origins, key)
            if slot.is_union:
                self._switch_variant(standing, value, key, slot, layer)
            table = slot.table_for(value.get(TAG, standing.get(TAG)))
            self._merge_table(standing, value, key, slots(table) if table is not None else {}, layer)

    def _switch_variant(self, target: dict[str, Any], incoming: dict[str, Any], key: Key, slot: Slot, layer: Layer):
        """Drop what only the old variant has. What neither has stays, to be reported as unknown."""
        old, new = slot.table_for(target.get(TAG)), slot.table_for(incoming.get(TAG))
        if old is None or new is None or old is new:
            return
        old_keys, new_keys = slots(old), slots(new)
        dropped = []
        for name in [name for name in target if name in old_keys and name not in new_keys]:
            del target[name]
            givers = self._forget((*key, name))
            if givers:
                dropped.append(f"{dotted((*key, name))} ({', '.join(givers)})")
        if dropped:
            switch = f"{dotted((*key, TAG))} = {show(incoming[TAG])} ({find_origin(layer.origins, (*key, TAG))})"
            self.notes.append(f"{switch} drops what only {show(target[TAG])} has: {', '.join(dropped)}")

    def _forget(self, key: Key) -> list[str]:
        """Take out the origins at and below a key; who they were, each once."""
        known = [other for other in self.origins if other[: len(key)] == key]
        return list(dict.fromkeys(self.origins.pop(other) for other in known))


def _start(slot: Slot) -> dict[str, Any] | None:
    """What a table starts from when the first layer touches it: its default, with the variant's `type`."""
    if not isinstance(slot.default, BaseModel):
        return None if slot.default_tag is None else {TAG: slot.default_tag}
    values = slot.default.model_dump(mode="json", exclude_unset=True)
    return {TAG: slot.default_tag, **values} if slot.default_tag is not None else values
