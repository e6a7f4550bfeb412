"""Work on batches in threads, a few batches ahead of their use, in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_THREADS = 2
"""One in the tokenizer's library, which uses all cores, and one in Python."""


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``function(item)`` of each item, in order.

    At most ``_THREADS`` items are in work or done but not yet used. Items are taken from ``items``
    in the calling thread, so only ``function`` needs to be safe to call from threads.
    """
    pending = deque[Future[Result]]()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize") as executor:
        try:
            for item in items:
                if len(pending) == _THREADS:
                    yield pending.popleft().result()
                pending.append(executor.submit(function, item))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
