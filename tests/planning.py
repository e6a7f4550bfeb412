"""Cases of the planner for tests: layouts in few words, of other software too."""

from dataclasses import fields, replace
from typing import Any

from moefold.config.base import Record
from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.moe.dispatch.config import DISPATCH
from moefold.parallel.config import Layout
from moefold.planner.case import Case
from moefold.planner.layouts import OptimizerOnHost, make_dispatch, make_offload, make_recompute

OWN = {field.name for field in fields(Case)}


def laid(**changes: Any) -> Layout:
    """Return a layout, unchecked; see :func:`stated`."""
    return Layout().model_copy(update=stated(**changes))


def relaid(case: Case, **changes: Any) -> Case:
    """Return a case with changed fields of its own, or of its layout (:func:`stated`)."""
    own = {name: value for name, value in changes.items() if name in OWN}
    rest = stated(**{name: value for name, value in changes.items() if name not in OWN})
    layout = own.pop("layout", case.layout).model_copy(update=rest)
    return replace(case, layout=layout, **own)


def stated(max_rows: int | None = None, **changes: Any) -> dict[str, Any]:
    """Return fields of a layout from records, or from what says the same in fewer words: sizes and
    stages, a dispatcher's kind, sets of modules, and ``host_share`` of the optimizer.
    """
    made = dict[str, Any]()
    for name, value in changes.items():
        match name, value:
            case "host_share", float():
                made["state"] = OptimizerOnHost(share=value)
            case "dispatch", str():
                made[name] = _dispatch(value, max_rows)
            case "recompute", frozenset():
                made[name] = make_recompute(value)
            case "offload", frozenset():
                made[name] = make_offload(value)
            case _, Sizes() | Stages():
                made[name] = value.text
            case _:
                made[name] = value
    return made


def _dispatch(kind: str, max_rows: int | None) -> Record:
    if max_rows is None:
        return make_dispatch(kind)
    return DISPATCH.kinds[kind].model_validate({"max_rows": max_rows})
