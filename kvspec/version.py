"""The version of the library.

It has a module of its own because `kvspec.protocol` sends it and must not import `kvspec`.
"""

__version__ = "0.1.0"
