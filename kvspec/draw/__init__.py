"""Pictures of plans and tables, as SVG text.

Law: only reads; a picture shows what is in the plan or the table and works nothing out anew. One
input gives one picture, byte for byte, and colour is never the only carrier of a fact.
"""

from kvspec.draw.plan_picture import plan_svg
from kvspec.draw.table_picture import table_svg

__all__ = [
    "plan_svg",
    "table_svg",
]
