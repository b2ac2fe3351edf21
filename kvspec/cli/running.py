"""Read the engines that run at some addresses, for `kvspec check` and `kvspec verify`.

Invariant: whatever is at the addresses, the command ends in time and prints a sentence about it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import typer

from kvspec.analysis.explanation import sizes
from kvspec.analysis.fewest import descriptor_counts
from kvspec.cli import options, printing
from kvspec.errors import KVSpecError, MismatchError, SpecError, counted, nbytes
from kvspec.session.deployment import Deployment, ask, read_engine
from kvspec.session.mailbox import Introduced
from kvspec.session.ports import MAX_PORT, port_range
from kvspec.wire.seal import secret_of

MAX_ADDRESSES = 4096
"""Addresses of one side. Each is a question at the same time."""
MAX_JUDGED_TOKENS = 1 << 17
"""Tokens of a request. Judging more takes minutes."""
SHORT_RUN = 4 << 10
"""Bytes. Shorter descriptors are slow on most networks."""

PRODUCER_ADDRESSES, CONSUMER_ADDRESSES = (
    options.engine_option(
        [],
        metavar="HOST:PORT",
        help=f"Addresses of all ranks of the {side}. Repeat the option, separate addresses by "
        "commas, or write HOST:FIRST-LAST for one rank at each port.",
    )
    for side in ("producer", "consumer")
)
TIMEOUT_OPTION = typer.Option(10.0, help="Seconds to wait for answers.")
NO_SECRET = typer.Option(
    False,
    "--no-secret",
    help="The engines have no secret. By default, KVSPEC_SECRET of the environment is theirs.",
)
_ADDRESS = re.compile(r"\[?(?P<host>.+?)\]?:(?P<ports>[0-9]+(?:-[0-9]+)?)")


def addresses(field: str, words: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses that *words* name, in order.

    >>> addresses("producer", ["10.0.0.1:9000-9001,prefill:9000", "[fd00::1]:9000"])
    ('10.0.0.1:9000', '10.0.0.1:9001', 'prefill:9000', 'fd00::1:9000')
    """
    found: list[str] = []
    for word in itertools.chain.from_iterable(text.split(",") for text in words):
        match = _ADDRESS.fullmatch(word.strip())
        if match is None:
            raise SpecError(field, word, "HOST:PORT, or HOST:FIRST-LAST")
        ports = port_range(match["ports"], field)
        if ports[0] == 0:
            raise SpecError(field, word, f"a port from 1 to {MAX_PORT}")
        found += [f"{match['host']}:{port}" for port in ports]
    if len(found) > MAX_ADDRESSES:
        raise SpecError(field, f"{len(found)} addresses", f"at most {MAX_ADDRESSES}")
    if repeated := [address for address, count in Counter(found).items() if count > 1]:
        raise SpecError(field, repeated[0], rule="each address may be named only once")
    return tuple(found)


class Running:
    """The engines at the addresses of a command. Each method prints what it finds.

    Attributes:
        secret: The secret of the engines.
        engines: The ranks of each side that was found whole.
        faults: What does not fit, in words. The command prints them and exits with status 1.
    """

    def __init__(self, producer: list[str], consumer: list[str], *, no_secret: bool) -> None:
        named = {"producer": producer, "consumer": consumer}
        self._asked = {side: addresses(side, words) for side, words in named.items() if words}
        if not self._asked:
            rule = "pass the addresses of the producer, of the consumer, or of both"
            raise SpecError("producer", None, rule=rule)
        self.secret = secret_of(b"" if no_secret else None)
        self.console = printing.output()
        self.engines: dict[str, tuple[Introduced, ...]] = {}
        self.faults: list[str] = []

    def say(self, line: str, style: str = "") -> None:
        """Print one line."""
        self.console.print(line, soft_wrap=True, style=style)

    def fault(self, what: str, error: KVSpecError | str) -> None:
        """Remember what does not fit."""
        lines = [str(error)]
        if isinstance(error, MismatchError):
            lines = [str(mismatch) for mismatch in error.mismatches]
        self.faults += [f"{what}: {' '.join(line.split())}" for line in lines]

    def find(self, timeout: float) -> None:
        """Ask all addresses, and print the engine of each side."""
        every = tuple(dict.fromkeys(itertools.chain.from_iterable(self._asked.values())))
        answers = ask(every, self.secret, timeout)
        for side, asked in self._asked.items():
            members = list[Introduced]()
            for address in asked:
                answer = answers[address]
                if isinstance(answer, Introduced):
                    members.append(answer)
                else:
                    self.fault(f"{side} at {address}", answer)
            if len(members) < len(asked):
                continue
            try:
                self.engines[side] = read_engine(members)
                self.say(described(side, self.engines[side]))
            except SpecError as error:
                self.fault(side, missing(members) or error)
            except KVSpecError as error:
                self.fault(side, error)

    def compare(self) -> Deployment | None:
        """Compare both engines, and print who reads what. None if they do not fit together."""
        if len(self.engines) != 2:  # noqa: PLR2004 - both sides
            return None
        try:
            made = Deployment.of(self.engines["producer"], self.engines["consumer"])
        except KVSpecError as error:
            self.fault("producer and consumer", error)
            return None
        return made

    def end(self, good: str) -> None:
        """Print the result. Exit with status 1 if anything does not fit."""
        for fault in self.faults:
            self.say(f"NO: {fault}", "bold red")
        if self.faults:
            raise typer.Exit(printing.WRONG)
        self.say(good, "bold green")


def missing(members: Sequence[Introduced]) -> str:
    """Return which ranks of an engine have no address, or which has two. Empty if none."""
    ranks = [member.rank for member in members]
    every = members[0].handshake.engine.parallel.ranks
    if absent := [str(rank) for rank in every if rank not in ranks]:
        names = ", ".join(absent[:8]) + (", ..." if absent[8:] else "")
        return f"the engine has {counted(len(every), 'rank')}: pass the address of {names} too"
    twice = [member for member in members if ranks.count(member.rank) > 1]
    places = " and ".join(member.address for member in twice)
    return f"rank {twice[0].rank} is at several addresses: {places}" if twice else ""


def described(side: str, members: tuple[Introduced, ...]) -> str:
    """Return one line about an engine: its name, ranks, sizes, model and versions."""
    shake = members[0].handshake
    engine = shake.engine
    ranks = counted(len(members), "rank")
    model = shake.model or "no model name"
    revision = f" revision {shake.revision}" if shake.revision else ""
    memory = sum(each.length for member in members for each in member.handshake.cache.memory)
    return (
        f"{side} {shake.engine_id}: {ranks}, {sizes(engine.parallel)}, layout {engine.layout}, "
        f"{nbytes(memory)} of caches, {model}{revision}, kvspec {shake.library}, "
        f"wire versions {shake.versions}"
    )


def show_pairs(running: Running, made: Deployment, tokens: int) -> None:
    """Print what moves between each two ranks for one request, from their real memory."""
    request = made.request(tokens)
    running.say(f"for a request of {request.num_tokens:,} tokens, in blocks in random order:")
    rows, short = list[tuple[str, ...]](), 0
    for (source, target), table in made.tables.items():
        posted, _ = descriptor_counts(table, request)
        size = sum(each.rows.nbytes * len(tiles) for each, tiles in table.tiles(request))
        edges = made.plan.between(source, target)
        layers = sum(len(edge.layers) for edge in edges)
        mean = size // posted if posted else 0
        short += 0 < mean < SHORT_RUN
        numbers = (f"{layers:,}", f"{size:,}", f"{posted:,}", nbytes(mean) if mean else "-")
        rows.append((str(target), str(source), *numbers))
    numbers = ("layers", "bytes", "descriptors", "mean run")
    printing.pairs(running.console, ("consumer", "producer", *numbers), rows, numbers)
    if short:
        pairs = counted(short, "pair")
        running.say(f"{pairs} of ranks move short runs: consider staging, see `kvspec calibrate`")
