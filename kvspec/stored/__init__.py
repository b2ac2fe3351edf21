"""Stored pages: what any engine wrote, any engine reads, under a name that cannot lie.

A page is stored under the digest of everything on which its values depend. Its memory is that of a
virtual engine, so engines of all sizes and layouts write and read it by ordinary plans.
"""

from kvspec.stored.bucket_objects import BucketObjects
from kvspec.stored.file_objects import FileObjects
from kvspec.stored.lookup import explain_lookup, longest_prefix
from kvspec.stored.names import ModelIdentity, PageNames, PromptIdentity, page_names, space_of
from kvspec.stored.objects import (
    MemoryObjects,
    ObjectContents,
    ObjectKey,
    Objects,
    StoredObject,
    StoredTensor,
)
from kvspec.stored.placement import PageObject, StoredSpec
from kvspec.stored.plans import PageLoadPlan, StorePlan, plan_load, plan_store
from kvspec.stored.publish import (
    BegunStore,
    BlocksReleased,
    PageFailed,
    PageStored,
    StoreLedger,
)
from kvspec.stored.store import Hit, Loaded, LoadError, PageStore, RankPages, Saved
from kvspec.tickets.stated import explain_difference

__all__ = [
    "BegunStore",
    "BlocksReleased",
    "BucketObjects",
    "FileObjects",
    "Hit",
    "LoadError",
    "Loaded",
    "MemoryObjects",
    "ModelIdentity",
    "ObjectContents",
    "ObjectKey",
    "Objects",
    "PageFailed",
    "PageLoadPlan",
    "PageNames",
    "PageObject",
    "PageStore",
    "PageStored",
    "PromptIdentity",
    "RankPages",
    "Saved",
    "StoreLedger",
    "StorePlan",
    "StoredObject",
    "StoredSpec",
    "StoredTensor",
    "explain_difference",
    "explain_lookup",
    "longest_prefix",
    "page_names",
    "plan_load",
    "plan_store",
    "space_of",
]
