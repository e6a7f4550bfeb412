"""Records of what goes to experts' ranks beside rows: clones of experts."""

from moefold.config.base import Record
from moefold.layers.config import Size


class Clones(Record):
    """Copies of hot experts on other ranks of ``ep``, made anew for each layer and micro-batch."""

    slots: Size = 2
    """Experts of other ranks that a rank takes in at most, beside its own."""
    least_rows: Size = 1
    """Rows that a clone takes at least, or there is none."""
