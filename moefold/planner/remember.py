"""Functions that remember what they made: for arguments that are records too."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def remembered(most: int) -> Callable[[Function], Function]:
    """Return a decorator that keeps the last ``most`` results of a function by its arguments.

    Checkers take a frozen record for something without a hash; ``lru_cache`` alone would have them
    complain wherever such a function is called.
    """
    return cast("Any", lru_cache(maxsize=most))
