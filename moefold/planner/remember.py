"""Functions that remember what they made: for arguments that are records too."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

Given = ParamSpec("Given")
Made = TypeVar("Made")


def remembered(most: int) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """Return a decorator that keeps the last ``most`` results of a function by its arguments.

    Checkers take a frozen record for something without a hash; ``lru_cache`` alone would have them
    complain wherever such a function is called.
    """

    def keep(function: Callable[Given, Made]) -> Callable[Given, Made]:
        return cast("Any", lru_cache(maxsize=most)(function))

    return keep
