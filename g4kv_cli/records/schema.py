"""JSON values into the dataclasses of a record: every field of the type that its annotation says, nothing unknown.

The dataclasses are the schema. ``to_json`` leaves out empty texts and tuples, so what is missing there is empty.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from g4kv_cli.errors import UsageError

_Record = TypeVar("_Record")
_EMPTY: Mapping[type, Any] = types.MappingProxyType({str: "", tuple: ()})


class SchemaError(ValueError):
    """A value that does not fit: where in the file, and what belongs there."""


def read_json(path: Path, fail: Callable[[str], UsageError]) -> Any:
    """The value in a file. Raises what ``fail`` makes of the reason that there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise fail(f"cannot read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise fail(f"not JSON: {error}") from error


def record_from(kind: type[_Record], value: object, where: str = "") -> _Record:
    """A ``kind`` from a JSON object. Raises SchemaError."""
    if not isinstance(value, dict):
        raise SchemaError(f"{where or 'the record'} must be an object, not {_shown(value)}")
    hints = _hints(cast(Any, kind))
    unknown = next((name for name in value if name not in hints), None)
    if unknown is not None:
        raise SchemaError(f"{_join(where, unknown)} is no field of a record; known there: {', '.join(hints)}")
    found = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in value:
            found[field.name] = _value_from(hints[field.name], value[field.name], _join(where, field.name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            empty = _EMPTY.get(get_origin(hints[field.name]) or hints[field.name])
            if empty is None:
                raise SchemaError(f"{_join(where, field.name)} is missing")
            found[field.name] = empty
    return kind(**found)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _value_from(hint: Any, value: object, where: str) -> Any:
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        return record_from(kind, value, where)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise SchemaError(f"{where} must be one of {', '.join(map(str, arguments))}, not {_shown(value)}")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (other,) = (one for one in arguments if one is not type(None))
        return _value_from(other, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise SchemaError(f"{where} must be a list, not {_shown(value)}")
        return tuple(_value_from(arguments[0], one, f"{where}[{index}]") for index, one in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise SchemaError(f"{where} must be an object, not {_shown(value)}")
        return {name: _value_from(arguments[1], one, _join(where, name)) for name, one in value.items()}
    return _scalar_from(hint, value, where)


def _scalar_from(hint: Any, value: object, where: str) -> Any:
    fits = {
        str: isinstance(value, str),
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
    }
    words = {str: "a text", bool: "true or false", int: "an integer", float: "a finite number"}
    if not fits[hint]:
        raise SchemaError(f"{where} must be {words[hint]}, not {_shown(value)}")
    return value


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
