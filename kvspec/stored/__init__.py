"""Stored pages: what any engine wrote, any engine reads, under a name that cannot lie.

A page is stored under the digest of everything on which its values depend. Its memory is that of a
virtual engine, so engines of all sizes and layouts write and read it by ordinary plans.
"""

from kvspec.stored.lookup import explain_lookup, longest_prefix
from kvspec.stored.names import ModelIdentity, PageNames, PromptIdentity, page_names, space_of
from kvspec.tickets.stated import explain_difference

__all__ = [
    "ModelIdentity",
    "PageNames",
    "PromptIdentity",
    "explain_difference",
    "explain_lookup",
    "longest_prefix",
    "page_names",
    "space_of",
]
