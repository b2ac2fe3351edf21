"""Descriptions of engines: groups of layers, parallel sizes, and the layout of the cache."""
