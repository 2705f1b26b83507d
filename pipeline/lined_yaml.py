"""YAML that remembers where it stood, and dataclasses read from it.

Tables know the line of every key and refuse a key given twice. Records are read by the fields of their
dataclass: a field may rename its key with `metadata={"key": ...}`, and one without a default must be given.
Only plain data is constructed (no tags that build objects). Source: ours.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml

Record = TypeVar("Record")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Table(dict[str, Any]):
    """A YAML mapping. `lines` holds the 1-based line of each key, `line` that of the mapping itself."""

    line: int
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    """SafeLoader that builds `Table`s and notes faults instead of letting the last of two equal keys win."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.faults: list[str] = []


def _table(loader: _Loader, node: yaml.MappingNode) -> Table:
    table = Table()
    table.line = node.start_mark.line + 1
    table.lines = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            loader.faults.append(f"line {line}: key {key!r} is not a string")
            continue
        if key in table:
            loader.faults.append(f"line {line}: key '{key}' given twice, first in line {table.lines[key]}")
            continue
        table[key] = loader.construct_object(value_node, deep=True)
        table.lines[key] = line
    return table


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _table)


def load(text: str) -> tuple[Table, list[str]]:
    """The top table of a document and its faults, each with a line. Unreadable text gives an empty table."""
    empty = Table()
    empty.line, empty.lines = 1, {}
    try:
        loader = _Loader(text)
        data = loader.get_single_data()
    except yaml.YAMLError as error:
        return empty, [f"not YAML: {' '.join(str(error).split())}"]
    if not isinstance(data, Table):
        return empty, [*loader.faults, "the document is not a table"]
    return data, loader.faults


class RecordReader:
    """Builds records from tables by the dataclasses' own fields, noting each fault with its line."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.broken: set[str] = set()
        self.lines: dict[str, int] = {}

    def fault(self, line: int, where: str, what: str) -> None:
        """Note a fault of the record `where`, which is broken from now on."""
        self.faults.append(f"line {line}: {where}: {what}")
        self.broken.add(where)

    def section(self, top: Table, name: str) -> Table:
        """A table of the top level; empty, with a fault, if it is missing or no table."""
        section = top.get(name)
        if isinstance(section, Table):
            self.lines[name] = top.lines[name]
            return section
        self.fault(top.lines.get(name, top.line), name, "missing" if section is None else "is not a table")
        section = Table()
        section.line, section.lines = top.line, {}
        return section

    def records(self, top: Table, section_name: str, cls: type[Record]) -> dict[str, Record]:
        """Every record of a section that has no fault."""
        section, good = self.section(top, section_name), {}
        build: Callable[..., Record] = cls
        for name, table in section.items():
            where = f"{section_name}.{name}"
            self.lines[where] = section.lines[name]
            if not _NAME.fullmatch(name):
                self.fault(section.lines[name], where, "a name is of [A-Za-z0-9_-]+")
            if not isinstance(table, Table):
                self.fault(section.lines[name], where, "is not a table")
                continue
            values = self.values(table, where, cls)
            if where not in self.broken:
                good[name] = build(name=name, **values)
        return good

    def values(self, table: Table, where: str, cls: type[Any]) -> dict[str, Any]:
        """The keyword arguments of `cls` that the table gives; faults for keys unknown, missing or mistyped."""
        hints, known, values = get_type_hints(cls), {"name"}, {}
        for item in dataclasses.fields(cls):
            if item.name == "name":
                continue
            key = str(item.metadata.get("key", item.name))
            known.add(key)
            if key in table:
                values[item.name] = self.value(table, key, where, hints[item.name])
            elif item.default is dataclasses.MISSING:
                self.fault(table.line, where, f"key '{key}' is missing")
        for key in table:
            if key not in known or key == "name":
                self.fault(table.lines[key], where, f"unknown key '{key}'")
        return values

    def value(self, table: Table, key: str, where: str, hint: Any) -> Any:
        """One value converted to its field's type; None, with a fault, if it is of another."""
        try:
            return _convert(table[key], hint)
        except ValueError as error:
            self.fault(table.lines[key], where, f"'{key}' {error}")
            return None


def _refuse(value: object, wanted: str) -> NoReturn:
    raise ValueError(f"is {value!r}, not {wanted}")


def _convert(value: object, hint: Any) -> Any:
    match hint:
        case _ if get_origin(hint) is tuple:
            if not isinstance(value, list):
                _refuse(value, "a list")
            return tuple(_convert(item, get_args(hint)[0]) for item in value)
        case _ if issubclass(hint, StrEnum):
            if value not in list(hint):
                _refuse(value, f"one of {', '.join(hint)}")
            return hint(value)
        case _ if hint is float:
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                _refuse(value, "a number")
            return float(value)
        case _:
            if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
                _refuse(value, {str: "text", int: "a whole number", bool: "true or false"}[hint])
            return value
