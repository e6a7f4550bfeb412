"""The base of every configuration record.

A record is frozen, refuses unknown keys, refuses values of another type (``"1e-4"`` is not a
number) and refuses NaN and infinities. Each room keeps its own records in a ``config.py`` that
imports no torch; this file knows no field of any feature.
"""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from moefold.config.problems import Violation


class Record(BaseModel):
    """A frozen, strict configuration record.

    ``owner`` names what is built from the record as ``"module:name"``. It is imported only when
    the record is chosen, so that configuration needs neither torch nor any optional package.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    owner: ClassVar[str | type | None] = None

    def rules(self) -> Iterator[Violation]:
        """Yield each broken relation between this record's fields, paths relative to it."""
        yield from ()
