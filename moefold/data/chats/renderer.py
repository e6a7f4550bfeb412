"""Rendering in a child process, with limits of time, memory and size.

A chat template is somebody else's program: it can loop, or build text and numbers without end. It
is therefore compiled and rendered in a forked process, which ends with this one. An alarm stops a
template in time, with the line at which it was; what does not heed the alarm, such as one very
large multiplication, the kernel ends a little later (``RLIMIT_CPU``).
"""

import gc
import json
import mmap
import os
import pickle
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO, NamedTuple, NoReturn

from moefold.data.chats.answers import AnswerFinder, TrainedConversation
from moefold.data.chats.messages import Message
from moefold.data.chats.template import MAX_CHARS, ChatTemplate, LimitExceeded, Rendered, TimeUp
from moefold.data.config import DataError
from moefold.data.corpora.records import BadDocument

_GRACE = 1
"""Seconds of processor time from the alarm to the end of the process."""
EXCEEDS = "the template exceeds a limit"
"""Reason of the errors after a limit."""


class Limits(NamedTuple):
    """What one rendering of a conversation may take."""

    seconds: float = 2.0
    """Processor time."""
    chars: int = MAX_CHARS
    """Characters of the text, besides four for each of the conversation's."""
    n_bytes: int = 2**29
    """Memory, besides what this process has."""


class TemplateText(NamedTuple):
    """What :class:`~moefold.data.chats.template.ChatTemplate` is compiled from."""

    text: str
    special: Mapping[str, str]
    source: str = "chat template"
    today: datetime | None = None


class _Text(NamedTuple):
    """Messages to be rendered, with ``prompt`` up to the beginning of the next answer."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    options: Mapping[str, Any]
    prompt: bool


class Renderer:
    """A chat template in a child process; to be closed, or used as a context.

    Args:
        template: the template.
        limits: limits for each conversation.

    Raises:
        DataError: if the template cannot be compiled within the limits.
    """

    def __init__(self, template: TemplateText, limits: Limits | None = None) -> None:
        self._template = template
        self._limits = limits or Limits()
        self._child: _Child | None = None
        self._start()

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def examples_of(
        self, conversations: Sequence[TrainedConversation]
    ) -> Iterator[list[Rendered] | BadDocument]:
        """Yield the examples of each conversation (:class:`AnswerFinder`), or its error."""
        for answer in self._answers(conversations):
            if isinstance(answer, BadDocument):
                yield answer
            else:
                yield [Rendered(text, tuple(map(tuple, spans)), m) for text, spans, m in answer]

    def text_of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
    ) -> str:
        """Return a conversation as text; with ``prompt``, up to the beginning of the next answer.

        Raises:
            BadDocument: if the template fails, or exceeds a limit.
        """
        (answer,) = self._answers([_Text(messages, tools, options or {}, prompt)])
        if isinstance(answer, BadDocument):
            raise answer
        return answer

    def _start(self) -> "_Child":
        if self._child is None:
            self._child = _Child(self._serve)
            try:
                answers = self._child.ask(None)
                if answers is None:
                    reason = f"the process that compiles it ended {self._child.end()}"
                    raise DataError(f"{self._template.source}: {EXCEEDS}: {reason}")
                ready = _read_answer(answers[0])
                if isinstance(ready, BadDocument):
                    raise DataError(": ".join([self._template.source, *ready.args]))
            except DataError:
                self.close()
                raise
        return self._child

    def _answers(self, requests: Sequence[Any]) -> Iterator[Any]:
        """Yield the child's answer to each request, or an error; start it again if it ends."""
        waiting = deque([list(requests)] if requests else [])
        while waiting:
            batch = waiting.popleft()
            child = self._start()
            answers = child.ask(batch)
            if answers is not None:
                yield from map(_read_answer, answers)
                continue
            failed = child.position
            reason = child.end()
            self.close()
            if len(batch) == 1:
                yield BadDocument(EXCEEDS, f"the process that renders it ended {reason}")
            else:  # the answers before it are lost
                parts = (batch[:failed], batch[failed : failed + 1], batch[failed + 1 :])
                waiting.extendleft(part for part in reversed(parts) if part)

    def _serve(self, child: "_Child") -> None:
        """Compile the template and answer requests, in the child process."""
        limits = self._limits
        guard = _Alarm(limits.seconds)
        memory = _memory() + limits.n_bytes
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        compiled = list[AnswerFinder]()

        def compile_template(_: Any) -> Any:
            text, special, source, today = self._template
            template = ChatTemplate(text, special, source, today, limits.chars, guard)
            compiled.append(AnswerFinder(template))

        def render(request: Any) -> Any:
            if isinstance(request, _Text):
                return compiled[0].text_of(*request)
            return compiled[0].examples_of(request)

        child.answer(compile_template, [None])
        while compiled:
            child.answer(render)


class _Child:
    """A forked process that reads lists of requests and writes lists of answers."""

    def __init__(self, serve: Callable[["_Child"], None]) -> None:
        self._position = mmap.mmap(-1, mmap.PAGESIZE)  # shared by both processes
        theirs_in, ours_out = _pipe()
        ours_in, theirs_out = _pipe()
        self._pid = os.fork()
        if self._pid:
            self._in = ours_in
            self._out = ours_out
            theirs_in.close()
            theirs_out.close()
            return
        self._in = theirs_in
        self._out = theirs_out
        _run_child(lambda: serve(self), theirs_in.fileno(), theirs_out.fileno())

    @property
    def position(self) -> int:
        """Index of the request that is being answered."""
        return int.from_bytes(self._position[:8], "little")

    def ask(self, requests: Sequence[Any] | None) -> list[Any] | None:
        """Send requests, if any, and return the answers; None if the process has ended."""
        with suppress(BrokenPipeError):
            if requests is not None:
                pickle.dump(requests, self._out)
                self._out.flush()
        line = self._in.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def answer(self, work: Callable[[Any], Any], requests: Sequence[Any] | None = None) -> None:
        """Answer requests, by default those that are asked next."""
        answers = list[Any]()
        for number, request in enumerate(pickle.load(self._in) if requests is None else requests):
            self._position[:8] = number.to_bytes(8, "little")
            answers.append(_answer(work, request))
        self._out.write(json.dumps(answers).encode() + b"\n")
        self._out.flush()

    def end(self) -> str:
        """End the process; say how it ended if it did so itself."""
        for file in (self._in, self._out):
            with suppress(BrokenPipeError):
                file.close()
        if not self._pid:
            return ""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            os.kill(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        by = -os.waitstatus_to_exitcode(status)
        if by == signal.SIGXCPU:
            return "by its limit of time"
        if by > 0:
            return f"by signal {by} ({signal.Signals(by).name})"
        return f"with status {-by}"


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb")


def _run_child(serve: Callable[[], None], *files: int) -> NoReturn:
    """Serve until the requests end, and end the process without this one's clean-up."""
    status = 1
    try:
        _close_others(*files)
        gc.freeze()  # the parent's objects stay, so that their pages stay shared
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        serve()
        status = 0
    except EOFError:  # the parent is done, or has ended
        status = 0
    finally:
        os._exit(status)


def _close_others(*kept: int) -> None:
    """Close inherited files but standard ones and ``kept``, so that none outlives the parent."""
    start = 3
    for number in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(start, number)
        start = number + 1


class _Alarm:
    """Raises ``TimeUp`` in the context once it has taken some seconds of processor time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        signal.signal(signal.SIGPROF, self._stop)

    def __enter__(self) -> None:
        last = int(time.process_time() + self._seconds) + 1 + _GRACE
        resource.setrlimit(resource.RLIMIT_CPU, (last, self._hard))
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (self._hard, self._hard))

    def _stop(self, *_: object) -> None:
        raise TimeUp(f"{self._seconds:g} s")


def _answer(work: Callable[[Any], Any], request: Any) -> list[Any]:
    """Do work for a request; return its result or error, to be sent as JSON."""
    try:
        return ["ok", work(request)]
    except BadDocument as error:
        return ["bad", error.args]
    except DataError as error:
        return ["data", error.args]
    except LimitExceeded as error:
        return ["bad", [EXCEEDS, *error.args]]
    except (MemoryError, RecursionError) as error:  # outside of the template
        return ["bad", [EXCEEDS, f"{type(error).__name__} {error}"]]


def _read_answer(answer: Sequence[Any]) -> Any:
    """Return the result that an answer has, or a ``BadDocument``; raise ``DataError``."""
    kind, value = answer
    if kind == "data":
        raise DataError(*value)
    return BadDocument(*value) if kind == "bad" else value


def _memory() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
