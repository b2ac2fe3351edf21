"""The longest prefix of a prompt that a store can serve to all groups of an engine.

Invariant: if a prefix is found, each group has everything that a query behind the prefix reads.

How it works:
    Groups need different pages. After 8 pages, full attention reads all of them. A window of two
    pages reads the last two, and a recurrent layer reads one state, that at the end of page 7. All
    three are the pages with live tokens, so one rule has them all. An ``x`` is a stored page:

        page      0 1 2 3 4 5 6 7
        full      x x x x x x x .      at most 7 pages
        window    . x x . x x x .      2 pages before the end: 3, 6 or 7 pages
        state     . . . x . x . .      4 or 6 pages
                                       all groups: 6 pages

    A longer prefix needs no earlier page than a shorter one. So if page 3 is missing for a prefix
    of 5 pages, it is missing for one of 4 too, and the next candidate has 3 pages. Each page of a
    group is asked for at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, counted
from kvspec.inputs import instance, positive_int, sequence

Has = Callable[[str, int], bool]
"""Whether everything of one group and one page is stored. The state of page k is after its end."""


def refusal(group: KVCacheGroup) -> str:
    """Return why pages of *group* cannot be stored, or "" if they can."""
    if not set(group.layers) - set(group.excluded):
        return ""
    if group.spec.is_ring:
        return "its layers keep a ring, which has only the last tokens of a running request"
    if not group.spec.counts_prompt:
        return "its tokens are those of an encoder, and a page has a name by tokens of the prompt"
    return ""


def pages_read(group: KVCacheGroup, num_pages: int, page_tokens: int) -> range:
    """Return the pages of *group* that a query behind *num_pages* pages reads.

    >>> from kvspec import MambaSpec, SlidingWindowSpec
    >>> window = SlidingWindowSpec(
    ...     block_size=16, total_num_kv_heads=1, head_size=8, dtype="uint8", sliding_window=40)
    >>> pages_read(KVCacheGroup(name="w", layers=["l"], spec=window), 8, 16)
    range(5, 8)
    """
    if not set(group.layers) - set(group.excluded):
        return range(0)
    live = group.spec.live_tokens(num_pages * page_tokens)
    return range(live.start // page_tokens, -(-live.stop // page_tokens)) if live else range(0)


def longest_prefix(
    groups: Iterable[KVCacheGroup], num_pages: int, page_tokens: int, has: Has
) -> int:
    """Return the largest number of leading pages that all *groups* can continue from.

    Args:
        groups: The groups of the engine that loads.
        num_pages: Number of pages of the prompt. An engine that must compute the last token itself
            leaves out the page that ends with it.
        page_tokens: Number of tokens of a page.
        has: Function that returns whether everything of a group, by its name, and of a page is
            stored. It is called at most once for each group and page.

    Returns:
        The number of pages. 0 if there is no such prefix, or if a group cannot be stored.

    Raises:
        SpecError: If an argument is wrong.

    >>> from kvspec import FullAttentionSpec
    >>> full = FullAttentionSpec(block_size=16, total_num_kv_heads=1, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["l"], spec=full)
    >>> longest_prefix([group], 8, 16, lambda name, page: page != 5)
    5
    """
    members = _checked(groups, num_pages, page_tokens)
    if any(map(refusal, members)):
        return 0
    # A group that reads all pages stops at the first hole, so a prompt that is not stored costs one
    # question. Then come those that read few pages.
    reads = [(group, pages_read(group, num_pages, page_tokens)) for group in members]
    reads.sort(key=lambda read: (read[1].start > 0, len(read[1])))
    # Of each group, all pages from here to the end of the prefix are known to be stored.
    first_known = dict.fromkeys((group.name for group in members), num_pages)
    pages, shorter = num_pages, True
    while shorter:
        shorter = False
        for group, _ in reads:
            needed = pages_read(group, pages, page_tokens)
            if not needed:
                continue
            unknown = range(needed.start, min(first_known[group.name], needed.stop))
            missing = next((page for page in unknown if not has(group.name, page)), None)
            first_known[group.name] = min(first_known[group.name], needed.start)
            if missing is not None:
                pages, shorter = missing, True
                break
    return pages


def explain_lookup(
    groups: Iterable[KVCacheGroup], num_pages: int, page_tokens: int, has: Has
) -> str:
    """Return in words how many tokens can be loaded, and which groups end the prefix.

    Args:
        groups: As in `longest_prefix`.
        num_pages: As in `longest_prefix`.
        page_tokens: As in `longest_prefix`.
        has: As in `longest_prefix`, but it is called several times.

    Returns:
        One line for the prefix, and one for each group that is not stored up to the end.

    Raises:
        SpecError: If an argument is wrong.

    >>> from kvspec import FullAttentionSpec
    >>> full = FullAttentionSpec(block_size=16, total_num_kv_heads=1, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["l"], spec=full)
    >>> print(explain_lookup([group], 8, 16, lambda name, page: page != 5))
    80 of 128 tokens can be loaded
    full: page 5 (tokens 80 to 95) is not stored
    """
    members = _checked(groups, num_pages, page_tokens)
    pages = longest_prefix(members, num_pages, page_tokens, has)
    total = counted(num_pages * page_tokens, "token")
    lines = [f"{pages * page_tokens:,} of {total} can be loaded"]
    longest = num_pages
    for group in members:
        if why := refusal(group):
            lines.append(f"{group.name}: {why}")
            continue
        alone = longest_prefix([group], num_pages, page_tokens, has)
        longest = min(longest, alone)
        if alone < num_pages:
            lines.append(f"{group.name}: {_end(group, alone, page_tokens)}")
    if pages < longest and not any(map(refusal, members)):
        shared = f"no longer prefix suits all groups: each ends at {longest * page_tokens:,} or "
        lines.append(f"{shared}later, but not all at the same token")
    return "\n".join(lines)


def _end(group: KVCacheGroup, pages: int, page_tokens: int) -> str:
    """Return why *group* alone cannot serve more than *pages* pages."""
    tokens = pages * page_tokens
    if not any(part.per_token for part in group.own_parts):
        return f"no state behind token {tokens:,} is stored" if tokens else "no state is stored"
    page = f"page {pages} (tokens {tokens:,} to {tokens + page_tokens - 1:,}) is not stored"
    if pages_read(group, pages + 1, page_tokens).start == 0:
        return page
    return f"{page}, and no later position has all its pages"


def _checked(groups: object, num_pages: int, page_tokens: int) -> tuple[KVCacheGroup, ...]:
    positive_int("num_pages", num_pages, least=0)
    positive_int("page_tokens", page_tokens)
    members = sequence("groups", groups, "KVCacheGroups")
    for group in members:
        instance("groups", group, KVCacheGroup)
    names = [group.name for group in members]
    if not members or len(set(names)) < len(names):
        raise SpecError("groups", names, "at least one group, and each name once")
    return members
