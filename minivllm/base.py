"""What every other file may use: the errors, integer and unit helpers. Knows nothing of the engine.

Three kinds of wrong, kept apart everywhere in this package:

* a user's mistake raises `UserError` with one sentence: field, value, limit, remedy;
* "no room right now" is `None`, and the caller decides;
* our own bug is an `assert` that says what was true.
"""

import difflib
from collections.abc import Iterable

GIB = 1 << 30
MIB = 1 << 20


class UserError(ValueError):
    """Something the caller can mend. The message is one sentence that says how."""


class ModelError(UserError):
    """The model's files cannot be used: missing, broken, or of a kind that is not supported."""


class EngineDeadError(RuntimeError):
    """The engine failed for good (a lost device, say) and answers no further request."""


def cdiv(a: int, b: int) -> int:
    """Integer division rounded up."""
    return -(-a // b)


def format_bytes(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`: binary units, because memory is sold in them."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def format_seconds(seconds: float) -> str:
    """`0.0042` -> `4.2 ms`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` when one of `known` is near `name`, else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
