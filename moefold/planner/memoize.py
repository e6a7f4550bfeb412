"""Memoisation of functions whose arguments may be records."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from moefold.config.base import Record

Function = TypeVar("Function", bound=Callable[..., Any])


def memoize(max_entries: int) -> Callable[[Function], Function]:
    """Return a decorator that caches a function's results by its positional arguments.

    Records are compared by identity and all else by value, as hashing a record visits everything
    in it. The cache is cleared when it holds ``max_entries`` results.
    """

    def decorate(function: Function) -> Function:
        cache: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

        @wraps(function)
        def call(*args: Any) -> Any:
            key = tuple([id(arg) if isinstance(arg, Record) else arg for arg in args])
            entry = cache.get(key)
            if entry is None:
                if len(cache) >= max_entries:
                    cache.clear()
                # Arguments are stored with the result, so that no other object gets their ids.
                entry = cache[key] = function(*args), args
            return entry[0]

        return cast("Function", call)

    return decorate
