"""Functions that remember what they made: for arguments that are records too."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from moefold.config.base import Record

Function = TypeVar("Function", bound=Callable[..., Any])


def remembered(most: int) -> Callable[[Function], Function]:
    """Return a decorator that keeps results of a function by its positional arguments.

    A record counts as the object that it is and all else by value, as a record's own hash walks
    through all that is below it. With ``most`` results the function begins anew.
    """

    def keep(function: Function) -> Function:
        known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

        @wraps(function)
        def call(*given: Any) -> Any:
            key = tuple([id(one) if isinstance(one, Record) else one for one in given])
            found = known.get(key)
            if found is None:
                if len(known) >= most:
                    known.clear()
                # What was given stays with the result, so that no other object takes its id.
                found = known[key] = function(*given), given
            return found[0]

        return cast("Function", call)

    return keep
