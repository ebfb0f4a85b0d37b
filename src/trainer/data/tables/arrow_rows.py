"""Rows of Arrow tables as the objects that were written.

A column of objects has one set of fields for all rows: what a row has not is null there. Those nulls are left out, at
every depth, because a template would write them out among the arguments of a tool. JSON columns and JSON fields (the
`Json` of `datasets`) are decoded; nulls inside them were written, and stay.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trainer.data.tables.json_text import read_json

if TYPE_CHECKING:
    import pyarrow as pa

_Restore = Callable[[Any], Any]


class RowMaker:
    """Turns tables of one schema into rows."""

    def __init__(self, schema: "pa.Schema") -> None:
        self._columns = {field.name: restore for field in schema if (restore := _restorer(field.type)) is not None}

    def rows(self, table: "pa.Table | pa.RecordBatch") -> Iterator[dict[str, Any]]:
        """Its rows; a null column stays."""
        for row in table.to_pylist(maps_as_pydicts="strict"):
            for name, restore in self._columns.items():
                value = row[name]
                if value is not None:
                    row[name] = restore(value)
            yield row


def _restorer(kind: "pa.DataType") -> _Restore | None:
    """What makes the Python value of a type (never None) the one that was written; None where it is that already."""
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        return read_json
    if isinstance(kind, pa.BaseExtensionType):
        return _restorer(kind.storage_type)
    if pa.types.is_struct(kind):
        return _struct_restorer({field.name: _restorer(field.type) for field in kind})
    if isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType | pa.ListViewType | pa.LargeListViewType):
        return _list_restorer(_restorer(kind.value_type))
    if pa.types.is_map(kind):
        return _map_restorer(_restorer(kind.item_type))
    return None


def _struct_restorer(fields: dict[str, _Restore | None]) -> _Restore:
    def restore(value: dict[str, Any]) -> dict[str, Any]:
        return {
            name: item if (restore_item := fields[name]) is None else restore_item(item)
            for name, item in value.items()
            if item is not None
        }

    return restore


def _list_restorer(restore_item: _Restore | None) -> _Restore | None:
    if restore_item is None:
        return None
    return lambda items: [item if item is None else restore_item(item) for item in items]


def _map_restorer(restore_item: _Restore | None) -> _Restore | None:
    if restore_item is None:
        return None
    return lambda items: {key: item if item is None else restore_item(item) for key, item in items.items()}
