"""Stand-ins of packages that take what the packages' own sources take at named revisions.

The signatures are facts of ``tests/data/dispatch_signatures.json`` (``tests/refresh_signatures.py``
reads them from the sources); what is done behind them is that of :mod:`tests.gloo.dispatch_fakes`.
"""

import json
from collections.abc import Callable
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

from tests.gloo import dispatch_fakes
from tests.refresh_signatures import FACTS

Facts = dict[str, dict[str, Any]]
"""Of one revision: what each function takes and returns."""
KNOWN: dict[tuple[str, str], Facts] = {
    (kind, revision): found["functions"]
    for kind, revisions in json.loads(FACTS.read_text("utf-8")).items()
    for revision, found in revisions.items()
}
"""By kind of dispatcher and revision of its package."""
Call = tuple[str, int, tuple[str, ...]]
"""A function's name, how many arguments came by position, and the names of the others."""


def stub(facts: Facts, log: list[Call]) -> ModuleType:
    """Return a module of the functions and classes of a revision, which notes its calls."""
    module = ModuleType("stub")
    for name in (name for name in facts if "." not in name):
        fake = getattr(dispatch_fakes, name)
        if isinstance(fake, type):
            methods = [other for other in facts if other.startswith(f"{name}.")]
            body = {m.rpartition(".")[2]: _method(facts, m, fake, log) for m in methods}
            init = _bound(name, facts[name], fake.__init__, log)
            fake = type(name, (fake,), {"__init__": init, **body})
        else:
            fake = _bound(name, facts[name], fake, log)
        setattr(module, name, fake)
    return module


def _method(facts: Facts, name: str, fake: Any, log: list[Call]) -> Any:
    bound = _bound(name, facts[name], getattr(fake, name.rpartition(".")[2]), log)
    return bound if facts[name]["takes"][0][0] == "self" else staticmethod(bound)


def _bound(
    name: str, facts: dict[str, Any], act: Callable[..., Any], log: list[Call]
) -> Callable[..., Any]:
    """Return a function that refuses what its package would, and then acts as the fake does."""
    takes = Signature(
        [
            Parameter(
                argument,
                getattr(Parameter, kind),
                default=Parameter.empty if default is None else default,
            )
            for argument, kind, default in facts["takes"]
        ]
    )

    def call(*args: Any, **named: Any) -> Any:
        given = takes.bind(*args, **named).arguments
        log.append((name, len(args) - ("self" in given), tuple(named)))
        result = act(**given)
        assert not facts["returns"] or len(result) in facts["returns"], name
        return result

    call.__signature__ = takes  # type: ignore[attr-defined]
    return call
