"""One rank leads, the others follow: hooks live on the first rank alone.

While the first rank tells its hooks of an event, the others wait for its word. A hook that asks the
job for something in which every rank takes part (an evaluation, a checkpoint) sends its name round,
and all do it; then the hooks go on. So a hook is written for one process and works on thousands.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from moefold.checkpoint.errors import SaveError
from moefold.comm.agree import FirstFailed, told_by_first
from moefold.comm.world import World


class Together:
    """The leading and the following of a job's ranks.

    Args:
        world: the ranks.
        parts: what all ranks do together, by name; arguments are small data that JSON can hold.
    """

    def __init__(self, world: World, parts: dict[str, Callable[..., Any]]) -> None:
        self._ranks = world.on_host
        self._parts = parts
        self._leads = False

    @property
    def leader(self) -> bool:
        """Whether this rank is the one that tells."""
        return self._ranks.index == 0

    def do(self, name: str, *args: Any) -> Any:
        """Do a part on all ranks: on the leader's word where it leads, else all come here alike."""
        leads, self._leads = self._leads, False
        try:
            if leads:
                self._say({"do": name, "args": args})
            return self._parts[name](*args)
        finally:
            self._leads = leads

    def while_leading(self, function: Callable[[], Any], answer: Callable[[], Any]) -> Any:
        """Run ``function`` on the leader while the others follow; return its ``answer`` on all.

        Raises:
            Exception: on the leader what the function raised.
            FirstFailed: on the others.
        """
        if self._ranks.size == 1:
            function()
            return answer()
        return self._lead(function, answer) if self.leader else self._follow()

    def _lead(self, function: Callable[[], Any], answer: Callable[[], Any]) -> Any:
        leads, self._leads = self._leads, True
        try:
            function()
        except BaseException as error:
            self._say({"error": f"{type(error).__name__}: {error}"})
            raise
        finally:
            self._leads = leads
        said = answer()
        self._say({"answer": said})
        return said

    def _follow(self) -> Any:
        while True:
            said = self._say(None)
            if "error" in said:
                raise FirstFailed(f"the first rank failed: {said['error']}")
            if "answer" in said:
                return said["answer"]
            with suppress(SaveError):  # The leader had it too, and says what comes of it.
                self._parts[said["do"]](*said["args"])

    def _say(self, words: Any) -> Any:
        return told_by_first(words, self._ranks)
