"""Converts Python values to overrides as on the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ._native import UserError

# Options of the command line that start processes, which are not keys.
RANKS = ("ranks", "gpus", "share_gpu", "nodes", "node", "address", "join_timeout")


def overrides(keys: Mapping[str, Any], one_process: str | None = None) -> list[str]:
    """Keys as ``key=value``, nested ones with joined names. Where Python uses one process only, `one_process` is the command that starts
    several."""
    for name in RANKS:
        if one_process is not None and name in keys:
            raise UserError(
                f"Python trains in this process alone, and {name} asks for several: "
                f"`{one_process} --{name.replace('_', '-')} ...` starts them, and flatout.Run reads the run"
            )
    return [f"{key}={word(key, value)}" for key, value in joined(keys)]


def joined(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of nested mappings with its full name."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from joined(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def word(key: str, value: Any) -> str:
    """A value as text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    # Subclasses, such as NumPy's float64, may have another representation.
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(element(key, one) for one in value) + "]"
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        # `item` returns the value itself where Python has no such number, as for NumPy's longdouble.
        held = value.item()
        if type(held) is not type(value):
            return word(key, held)
    raise UserError(f"{key} is a {type(value).__name__}: give a number, a text, True or False, or a list of them")


def element(key: str, value: Any) -> str:
    """A value inside a list, in TOML's syntax."""
    if isinstance(value, (str, os.PathLike)):
        return quoted(os.fspath(value))
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{quoted(str(name))} = {element(key, held)}" for name, held in value.items()) + " }"
    return word(key, value)


def quoted(text: str) -> str:
    """A text in quotation marks. TOML has the escapes of JSON except surrogates, and requires DEL to be escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
