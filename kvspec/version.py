"""The version of the library.

`kvspec.wire` sends the version, and importing `kvspec` there would be a circular import.
"""

__version__ = "0.1.0"
