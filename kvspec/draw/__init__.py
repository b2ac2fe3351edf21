"""Draw plans and descriptor tables as SVG text.

Invariant: the pictures show only facts of the plan or the table. The same input always gives the
same bytes. Each fact that a colour shows is also shown by a text, a pattern or a dash.
"""

from kvspec.draw.plan_picture import plan_svg
from kvspec.draw.table_picture import table_svg

__all__ = [
    "plan_svg",
    "table_svg",
]
