"""Read the ports and the public host of a channel as users write them.

Invariant: each setting has one meaning in a channel and in all adapters, because all read it here.
"""

from __future__ import annotations

import ipaddress
import re

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence

MAX_PORT = 65535
WANTED = "a port, or a range of ports such as '9000-9015' or (9000, 9015)"

Ports = int | str | tuple[int, int] | range
"""A port, or the first and the last port of a range. 0 lets the system select a free port."""


def port_range(value: object, field: str = "port") -> range:
    """Return the ports that *value* allows, in the order in which they are tried.

    Args:
        value: A port, a pair of the first and the last port, a `range`, or a text such as
            ``"9000"`` or ``"9000-9015"``. The last port belongs to the range. 0 alone lets the
            system select a free port.
        field: Name of the setting for the error.

    Raises:
        SpecError: If the value is of another kind, a port is not in 1 to 65535, or the last port is
            less than the first.

    >>> port_range(0), port_range("9000-9002"), list(port_range((9000, 9002)))
    (range(0, 1), range(9000, 9003), [9000, 9001, 9002])
    """
    if isinstance(value, range):
        if not value or value.step != 1:
            raise SpecError(field, value, rule="the range of ports is empty, or its step is not 1")
        first, last = value[0], value[-1]
    elif isinstance(value, str):
        first, last = _numbers(field, value)
    elif isinstance(value, (tuple, list)):
        ends = sequence(field, value, "two ports, the first and the last")
        if len(ends) != 2:  # noqa: PLR2004 - the first and the last
            raise SpecError(field, value, WANTED)
        first, last = ends
    else:
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(field, value, WANTED)
        first = last = value
    alone = first == last
    for port in (first, last):
        positive_int(field, port, least=0 if alone else 1, most=MAX_PORT)
    if last < first:
        raise SpecError(field, value, rule="the range of ports is empty: the last is the smaller")
    return range(first, last + 1)


def _numbers(field: str, text: str) -> tuple[int, int]:
    """Return the first and the last port of a text."""
    first, dash, last = text.partition("-")
    numbers = [word.strip() for word in ((first, last) if dash else (first, first))]
    # `int` would also accept signs, underscores and digits of other scripts.
    if not all(re.fullmatch("[0-9]{1,5}", number) for number in numbers):
        raise SpecError(field, text, WANTED)
    return int(numbers[0]), int(numbers[1])


def public_host(value: object, field: str = "public") -> str:
    """Return *value* if it is a host name or an IP address without a port, or empty.

    >>> public_host("10.0.0.5"), public_host("prefill-0.prefill"), public_host("fd00::5")
    ('10.0.0.5', 'prefill-0.prefill', 'fd00::5')
    """
    host = instance(field, value, str)
    wanted = "the host name or IP address by which peers reach this machine, without a port"
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise SpecError(field, value, wanted) from None
    elif any(char.isspace() or char in "/[]@" for char in host):
        raise SpecError(field, value, wanted)
    return host
