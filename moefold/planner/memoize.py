"""Memoisation of functions whose arguments may be records."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from moefold.config.base import Record

Function = TypeVar("Function", bound=Callable[..., Any])


def memoize(max_entries: int) -> Callable[[Function], Function]:
    """Return a decorator that caches results of a function by its positional arguments.

    Records are compared by identity and all else by value, as hashing a record visits everything
    in it. The cache is cleared when it holds ``most`` results.
    """

    def keep(function: Function) -> Function:
        known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

        @wraps(function)
        def call(*given: Any) -> Any:
            key = tuple([id(one) if isinstance(one, Record) else one for one in given])
            found = known.get(key)
            if found is None:
                if len(known) >= max_entries:
                    known.clear()
                # Arguments are stored with the result, so that no other object gets their ids.
                found = known[key] = function(*given), given
            return found[0]

        return cast("Function", call)

    return keep
