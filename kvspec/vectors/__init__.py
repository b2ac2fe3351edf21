"""Test vectors: transfers with their right slices and copies, as JSON for any language.

Invariant: each vector was planned by the library, and its copies moved real bytes that the oracle
of `kvspec.testing` found right. A vector that the oracle refuses is never written.

How it works:
    A *family* is one axis on which engines differ, such as TP sizes or windows. It has one file.

    module        what it contains
    ------------  ------------------------------------------------------------
    `structure`   the structures of the JSON, from which the JSON Schema is made
    `families`    the transfers of each family
    `recording`   one transfer, planned, moved, judged and written as a vector
    `files`       files: write, read, compare with the library
    `digests`     contents with their digests, in a file of their own

    The rules by which other programs compute the same result are in `docs/spec.md`.
"""
