"""Serving engines' own descriptions of their caches, read as this library's."""
