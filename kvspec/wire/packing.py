"""Write values as MessagePack, and read them from untrusted bytes.

Invariant: any bytes give a value of the given class, or a `WireError` with the path of the fault.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from kvspec.errors import SpecError, WireError
from kvspec.inputs import MOST

S = TypeVar("S")
Count = Annotated[int, Meta(ge=0, le=MOST)]
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]

# Characters of a text in an error. A stranger chose the text, and it must stay readable.
MAX_QUOTED = 1024


class WireStruct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the values that travel as an array of their fields, in the order of the class."""


def _plain(numbers: range) -> tuple[int, int]:
    """Return a range as a pair. `msgspec` calls this for the only type that it does not know."""
    return numbers.start, numbers.stop


def _typed(_: type, plain: object) -> range:
    """Return the range that `_plain` wrote."""
    return range(*msgspec.convert(plain, tuple[Count, Count]))


pack = msgspec.msgpack.Encoder(enc_hook=_plain).encode
"""Return a struct as MessagePack bytes."""


def decoder_of(kind: type[S]) -> msgspec.msgpack.Decoder[S]:
    """Return the decoder of a struct, or of a union of structs. Create it once: that is slow."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_typed)


def unpack(path: str, decoder: msgspec.msgpack.Decoder[S], data: bytes) -> S:
    """Return the value that `pack` wrote.

    Args:
        path: Name of the whole in errors.
        decoder: What `decoder_of` returned.
        data: Any bytes.

    Returns:
        The value.

    Raises:
        WireError: If *data* is not such a value. The path is that of the first fault.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem, _, place = str(error).partition(" - at `")
        where = place[:MAX_QUOTED].rstrip("`")
        # Fields of a map have names. The elements of an array have only numbers.
        where = where.removeprefix("$.") if where.startswith("$.") else path + where[1:]
        # A value that checks itself raised SpecError, which has the field and its value.
        if isinstance(error.__cause__, SpecError):
            refuse(where, error.__cause__, path)
        raise WireError(where, f"{len(data)} bytes", rule=problem[:MAX_QUOTED]) from None


def refuse(path: str, error: Exception, what: str) -> NoReturn:
    """Raise the error of a constructor as a `WireError` with the path of the value."""
    if isinstance(error, SpecError):
        where = f"{path}.{error.field[:MAX_QUOTED]}"
        expected, rule = error.expected[:MAX_QUOTED], error.rule[:MAX_QUOTED]
        raise WireError(where, error.value, expected, rule=rule) from None
    raise WireError(path, f"{error}"[:MAX_QUOTED], f"fields that {what} accepts") from None
