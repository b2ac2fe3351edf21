"""Find the name of a stored page by SGLang's hash of the page.

SGLang calls its storage with hashes, without tokens. A hash is a chain over tokens, as a name is,
but it contains neither the model nor the adapter. So the two are never equal.

Invariant: a hash gets a name only together with the tokens from which SGLang has computed it.

How it works:
    SGLang has the tokens at two places. There the plug-in passes them on:

        place                      what is there
        a prompt is looked up      all tokens of the prompt, and what separates callers
        a node of the radix tree   the tokens and the hashes of the node, and the hashes before it
        is stored

    A node may end with generated tokens. The name of its first page continues the name of the page
    before it. If that name is not known any more, the pages of the node have no name: they are not
    stored, and they are not found.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.stored.names import PromptIdentity, next_names, page_names

# Hashes that are kept. A page of a waiting prompt is needed until SGLang has read or stored it.
MOST_PAGES = 1 << 17

# A function that returns SGLang's hashes of tokens, behind a page with a hash or from the start.
Hasher = Callable[[Sequence[int], str | None], Sequence[str]]


@attrs.frozen
class NamedPage:
    """The stored pages of one page of SGLang.

    Attributes:
        first: Number of its first stored page in the prompt.
        names: Names of its stored pages.
    """

    first: int
    names: tuple[str, ...]


class PageHashes:
    """The names of the pages of one engine, by SGLang's hashes. Several threads may use it.

    Attributes:
        per_page: Stored pages of a page of SGLang.
        unnamed: Number of the pages that SGLang wanted to store, and that had no name.
    """

    def __init__(
        self,
        space: str,
        page_tokens: int,
        page_size: int,
        *,
        vocabulary: int,
        hashes: Hasher,
        most: int = MOST_PAGES,
    ) -> None:
        """Start with no page.

        Args:
            space: As in `page_names`.
            page_tokens: Tokens of a stored page. It divides *page_size*.
            page_size: Tokens of a page of SGLang.
            vocabulary: Number of tokens of the model. SGLang puts larger numbers in the place of an
                image, which have no name.
            hashes: SGLang's function that computes the hashes of pages.
            most: Number of hashes that are kept. The others are forgotten, the oldest first.

        Raises:
            SpecError: If a stored page does not fit into a page of SGLang.
        """
        self.per_page, rest = divmod(page_size, positive_int("page_tokens", page_tokens))
        if rest or not self.per_page:
            wanted = f"a divisor of SGLang's page_size={page_size}: it stores whole pages"
            raise SpecError("page_tokens", page_tokens, wanted)
        self._space, self._page_tokens, self._page_size = space, page_tokens, page_size
        self._vocabulary, self._hashes, self._most = vocabulary, hashes, most
        self._pages: OrderedDict[str, NamedPage] = OrderedDict()
        self._lock = threading.Lock()
        self.unnamed = 0

    def add_prompt(self, token_ids: Sequence[int], seed: str | None, salt: str | bytes) -> None:
        """Name the whole pages of a prompt.

        Args:
            token_ids: All tokens of the prompt.
            seed: The value from which SGLang's hashes of this caller begin. None for no value.
            salt: What separates callers. "" for nothing.
        """
        whole = self._whole(token_ids)
        hashes = self._hashes(whole, seed)
        # A prompt that waits is looked up again and again.
        if not self._touch(hashes):
            prompt = PromptIdentity.of_text(salt=salt)
            names = page_names(self._space, whole, self._page_tokens, prompt)
            self._add(hashes, names, 0)

    def add_pages(
        self, token_ids: Sequence[int], hashes: Sequence[str], before: str | None
    ) -> None:
        """Name the pages of a node of SGLang's tree.

        Args:
            token_ids: Tokens of the node.
            hashes: SGLang's hashes of its pages.
            before: SGLang's hash of the page before it. None if it begins a prompt.
        """
        whole = self._whole(token_ids)
        known = next((n for n, text in enumerate(hashes) if self.find(text) is None), len(hashes))
        if known == len(hashes):
            return
        rest = whole[known * self._page_size :]
        wanted = list(hashes[known : known + len(rest) // self._page_size])
        last = hashes[known - 1] if known else before
        # The tokens of another caller begin with another seed, so these hashes would differ.
        if not wanted or list(self._hashes(rest, last)) != wanted:
            return
        if last is None:
            text = PromptIdentity.of_text()
            self._add(wanted, page_names(self._space, rest, self._page_tokens, text), 0)
        elif (page := self.find(last)) is not None:
            names = next_names(page.names[-1], rest, self._page_tokens)
            self._add(wanted, names, page.first + self.per_page)

    def _whole(self, token_ids: Sequence[int]) -> array[int]:
        """Return the tokens of the whole pages before the first image."""
        tokens = np.asarray(token_ids, np.int64)
        strange = np.flatnonzero((tokens < 0) | (tokens >= self._vocabulary))
        end = int(strange[0]) if len(strange) else len(tokens)
        return array("q", tokens[: end // self._page_size * self._page_size].tobytes())

    def _add(self, hashes: Sequence[str], names: Sequence[str], first: int) -> None:
        size = self.per_page
        with self._lock:
            for place, text in enumerate(hashes):
                own = tuple(names[place * size : (place + 1) * size])
                self._pages[text] = NamedPage(first + place * size, own)
                self._pages.move_to_end(text)
            while len(self._pages) > self._most:
                self._pages.popitem(last=False)

    def _touch(self, hashes: Sequence[str]) -> bool:
        """Return whether all *hashes* have names. Then they are forgotten last."""
        with self._lock:
            if not all(text in self._pages for text in hashes):
                return False
            for text in hashes:
                self._pages.move_to_end(text)
            return True

    def find(self, text: str) -> NamedPage | None:
        """Return the page with the hash *text*, or None if it has no name."""
        with self._lock:
            return self._pages.get(text)

    def run(self, hashes: Sequence[str]) -> list[NamedPage]:
        """Return the first pages of *hashes*, up to one that has no name or does not follow."""
        found: list[NamedPage] = []
        for text in hashes:
            page = self.find(text)
            if page is None or (found and page.first != found[-1].first + self.per_page):
                break
            found.append(page)
        return found
