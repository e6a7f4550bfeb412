"""Inputs of the served page: its fields, the question they ask, and what is wrong with them.

A field stands for an option or an override of ``moefold plan``, and takes the same text. Each error
belongs to a field, with the command line's message and the nearest legal value where one is known.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar, get_args

from moefold.config.errors import (
    MISSING,
    Remove,
    RunError,
    Violation,
    format_value,
    format_violation,
)
from moefold.layers.config import MAX_SIZE
from moefold.moe.dispatch.config import DISPATCH
from moefold.planner.case import Recipe
from moefold.planner.goodput import Price
from moefold.planner.hardware import Cluster, StatedLinks, catalogue, parse_cluster
from moefold.planner.plan import MAX_NUMBER, Plan, is_run, prepare, require_positive
from moefold.planner.published import published_entries
from moefold.planner.search_space import stated_recipe
from moefold.planner.task import DEFAULT_LOAD, DEFAULT_SEQ
from moefold.run import recipes
from moefold.schedule.config import SCHEDULE

Result = TypeVar("Result")
COMPARED = "A layout to compare with: sizes and policies"
MORE = "More: links, memory, load, length and price of a run, frozen weights, overrides"
EXAMPLE = {"model": "qwen3_30b_a3b", "cluster": "h100x64"}
"""Texts of a page that nobody has asked anything yet."""
MAX_TEXT = 2000
"""Characters of a field."""


@dataclass(frozen=True)
class Field:
    """An input of the page."""

    name: str
    label: str
    option: str
    """What the command line calls it: an option, or an override that ends with ``=``."""
    hint: str
    """What it means, in a sentence with units and default."""
    choices: tuple[str, ...] = ()
    closed: bool = False
    """Whether only ``choices`` are legal; otherwise they are suggestions."""
    number: type[int] | type[float] | None = None
    group: str = ""
    """Heading under which it is folded away; empty for what everybody states."""


FIELDS = (
    Field(
        "model", "model", "RUN",
        "published model, recipe, run file or Hugging Face folder",
        (*recipes(), *published_entries()),
    ),
    Field(
        "cluster", "cluster", "--cluster",
        "device × number, such as h100x64; cpu; or a .json file",
        tuple(f"{name.lower()}x8" for name in catalogue()),
    ),
    Field(
        "batch", "batch", "--batch",
        "sequences per step; default: the run's",
        number=int,
    ),
    Field(
        "seq", "length", "--seq",
        f"tokens of each; default: the run's, or {DEFAULT_SEQ:,}",
        number=int,
    ),
    Field(
        "precision", "precision", "--precision",
        "number format; default: the run's, or the fastest",
        ("bf16", "fp8", *(name for name in get_args(Recipe) if name != "bf16")),
    ),
    Field(
        "adapter", "adapter", "adapter=",
        "low-rank weights that are trained instead; default: none",
        ("{kind: lora, rank: 16}", "{kind: lora, rank: 64}"),
    ),
    Field(
        "layout", "layout", "layout.sizes=",
        "ranks per axis of the layout to compare with, such as pp2 ep8",
        group=COMPARED,
    ),
    Field(
        "zero", "ZeRO", "layout.zero=",
        "what data ranks share out: 1 optimizer state, 2 and gradients, 3 and weights",
        ("0", "1", "2", "3"), closed=True,
        group=COMPARED,
    ),
    Field(
        "recompute", "recompute", "layout.recompute=",
        "activations that backward computes again",
        ("full", "auto", "{kind: selective, modules: [norms, experts]}"),
        group=COMPARED,
    ),
    Field(
        "schedule", "schedule", "layout.schedule=",
        "order of passes in the pipeline",
        tuple(SCHEDULE.kinds), closed=True,
        group=COMPARED,
    ),
    Field(
        "dispatch", "dispatch", "layout.dispatch=",
        "how rows reach the ranks of their experts",
        tuple(DISPATCH.kinds),
        group=COMPARED,
    ),
    Field(
        "graphs", "graphs", "layout.graphs=",
        "CUDA graphs: what is launched as one",
        ("none", "partial", "step"), closed=True,
        group=COMPARED,
    ),
    Field(
        "freeze", "freeze", "train.freeze=",
        "patterns of weights that are not trained, such as [layers.0.*]",
        group=MORE,
    ),
    Field(
        "overrides", "further overrides", "k=v",
        "of a run file, such as train.micro_batch=2",
        group=MORE,
    ),
    Field(
        "load", "expert load", "--load",
        f"rows of the fullest expert rank over the mean; default: {DEFAULT_LOAD}",
        number=float, group=MORE,
    ),
    Field(
        "memory", "memory", "--memory",
        "of a device, GB of 10⁹ bytes; default: nominal", number=float, group=MORE,
    ),
    Field(
        "links", "links", "--links",
        "inside a node: switch, mesh or pcie, GB/s in one direction, or pcie:20",
        ("switch", "mesh:56", "pcie"), group=MORE,
    ),
    Field(
        "node", "node", "--node",
        "devices that these links connect; default: as sold", number=int, group=MORE,
    ),
    Field(
        "network_gb", "network", "--network-gb",
        "GB/s of each device in one direction beyond its node; default: as sold",
        number=float, group=MORE,
    ),
    Field(
        "tokens", "tokens", "--tokens",
        "of the whole run, such as 15e12, to show days and energy", number=float, group=MORE,
    ),
    Field(
        "price", "price", "--price",
        "of a device-hour, to show the cost", number=float, group=MORE,
    ),
)  # fmt: skip
BY_NAME = {field.name: field for field in FIELDS}
POLICIES = ("layout", "zero", "recompute", "schedule", "dispatch", "graphs")
"""Fields of the layout that is compared with what the search finds."""
OPTIONS = ("precision", "seq")
"""Options of published models, which overrides of a run stand for."""
KEYS = {
    "data.seq": "seq",
    "train.batch": "batch",
    "train.precision": "precision",
    "train.quantise": "precision",
    **{field.option[:-1]: field.name for field in FIELDS if field.option.endswith("=")},
}
"""Fields by the keys of a run file."""
STARTS = (
    ("precision", "precision"),
    ("seq", "seq"),
    ("load", "load"),
    ("price", "price"),
    ("cluster", "cluster"),
    ("unknown device", "cluster"),
    ("batch", "batch"),
    *((field.option, field.name) for field in FIELDS if field.option.startswith("--")),
)
"""First words of messages, and the fields that they are about."""
_NEAREST = re.compile(r"(?:nearest: |similar names: )(.+?)(?=;|,| \(|\n|$)")


@dataclass(frozen=True)
class Complaint:
    """What is wrong with a field."""

    field: str
    message: str
    nearest: str | None = None
    """The nearest legal text, if it is known."""


class RefusedQuestion(ValueError):
    """The inputs are not legal."""

    def __init__(self, complaints: list[Complaint]) -> None:
        self.complaints = complaints
        super().__init__("\n".join(one.message for one in complaints))


@dataclass(frozen=True)
class Question:
    """What the inputs ask."""

    command: str
    """The command line that asks the same."""
    tokens: float | None
    plan: Plan
    """The plan before its search."""
    notes: tuple[Complaint, ...] = ()
    """What is wrong with the stated layout, which searches do not need."""


def first_values(options: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, str]:
    """Return the texts with which the fields begin.

    Args:
        options: options of the command by their names, ``source`` among them.
        overrides: overrides of a run; those without a field are in ``overrides``.
    """
    values = {
        field.name: _text(options[field.name])
        for field in FIELDS
        if field.option.startswith("--") and field.name in options
    }
    if options.get("load") == DEFAULT_LOAD:
        del values["load"]
    values |= EXAMPLE if "source" not in options and "cluster" not in options else {}
    if "source" in options:
        values["model"] = options["source"]
    further = []
    for override in overrides:
        key, equals, text = override.partition("=")
        name = KEYS.get(key)
        if equals and name is not None and BY_NAME[name].option == f"{key}=":
            values[name] = text.strip('"') if name == "layout" else text
        else:
            further.append(override)
    if further:
        values["overrides"] = shlex.join(further)
    return values


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def form_json(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields, and the texts with which they begin, for the page."""
    fields = [asdict(field) | {"number": field.number is not None} for field in FIELDS]
    return {"fields": fields, "values": dict(values)}


def ask(values: Mapping[str, str]) -> Question:
    """Read the texts of the fields, and plan what needs no search.

    Raises:
        RefusedQuestion: the texts are not legal.
    """
    complaints = list(_unreadable(values))
    if complaints:
        raise RefusedQuestion(complaints)
    texts = {name: text.strip() for name, text in values.items() if text.strip()}
    numbers = dict[str, Any]()
    for field in FIELDS:
        if field.number is not None and field.name in texts:
            try:
                numbers[field.name] = _number(field, field.number, texts[field.name])
            except RefusedQuestion as refused:
                complaints += refused.complaints
        elif field.closed and texts.get(field.name, field.choices[0]) not in field.choices:
            message = f"{field.label}: must be one of {', '.join(field.choices)}"
            complaints.append(Complaint(field.name, message, field.choices[0]))
    if "model" not in texts:
        complaints.append(Complaint("model", "the following arguments are required: RUN", "tiny"))
    if "cluster" not in texts:
        message = "the following arguments are required: --cluster"
        complaints.append(Complaint("cluster", message, "h100x8"))
    if complaints:
        raise RefusedQuestion(complaints)
    return _planned(texts, numbers)


def _unreadable(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield fields that do not exist, and texts that are too long or none."""
    for name, text in values.items():
        if name not in BY_NAME:
            yield Complaint("model", f"the page has no field {name[:40]!r}")
        elif not isinstance(text, str) or len(text) > MAX_TEXT or "\0" in text:
            yield Complaint(name, f"must be a text of at most {MAX_TEXT:,} characters")


def _number(field: Field, kind: type[int] | type[float], text: str) -> int | float:
    most = MAX_SIZE if kind is int else MAX_NUMBER
    try:
        value = kind(text)
    except ValueError:
        message = f"argument {field.option}: invalid {kind.__name__} value: {text!r}"
        raise RefusedQuestion([Complaint(field.name, message, _near_number(kind, text))]) from None
    try:
        require_positive(most, **{field.option: value})
    except ValueError as error:
        nearest = format_value(most if value > 1 else 1)
        raise RefusedQuestion([Complaint(field.name, str(error), nearest)]) from None
    return value


def _near_number(kind: type[int] | type[float], text: str) -> str | None:
    """Return the number that a text means, as the command line takes it."""
    found = re.search(r"\d[\d,_]*(\.\d+)?(e\d{1,2})?", text)
    if found is None:
        return None
    value = float(re.sub("[,_]", "", found[0]))
    return str(max(1, round(value))) if kind is int else f"{value:g}"


def _planned(texts: dict[str, str], numbers: dict[str, Any]) -> Question:
    """Return the plan of legal numbers and of texts that may still be wrong."""
    about = partial(_blamed, texts)
    parse = StatedLinks.parse
    stated = (texts.get("links"), numbers.get("node"), numbers.get("network_gb"))
    links = about("links", lambda: parse(*stated))
    cluster = about("cluster", lambda: parse_cluster(texts["cluster"], links))
    price = about("price", lambda: Price(numbers.get("price")))
    run = is_run(texts["model"])
    further = about("overrides", lambda: shlex.split(texts.get("overrides", "")))
    overrides = about("precision", lambda: _overrides(texts, cluster, run, further))
    plan = about(
        "model",
        lambda: prepare(
            texts["model"],
            cluster,
            batch=numbers.get("batch"),
            seq=None if run else numbers.get("seq"),
            precision=None if run else texts.get("precision"),
            load=numbers.get("load", DEFAULT_LOAD),
            memory_gb=numbers.get("memory"),
            price=price,
            overrides=overrides,
        ),
    )
    tokens = numbers.get("tokens") or plan.task.tokens
    notes = tuple(_layout_notes(texts, plan))
    return Question(_command(texts, overrides, run), tokens, plan, notes)


def _layout_notes(texts: Mapping[str, str], plan: Plan) -> Iterator[Complaint]:
    """Yield why the layout that the fields state, or the run's own, cannot be planned."""
    stated = [name for name in ("batch", *POLICIES) if name in texts]
    if plan.given is None and plan.run is not None and stated:
        yield _complaint(texts, plan.given_problem, stated[-1])


def _overrides(
    texts: Mapping[str, str], cluster: Cluster, run: bool, further: list[str]
) -> list[str]:
    """Return the overrides of a run that the fields state, and ``further`` ones."""
    stated = [
        f"{field.option}{texts[field.name]}"
        for field in FIELDS
        if field.option.endswith("=") and field.name in texts
    ]
    stated += further
    if run and "seq" in texts:
        stated.append(f"data.seq={texts['seq']}")
    if run and "precision" in texts:
        recipe = stated_recipe(texts["precision"], cluster.device)
        if recipe in ("bf16", "fp32"):
            stated += [f"train.precision={recipe}", "train.quantise=null"]
        else:
            stated.append(f"train.quantise={{kind: {recipe}}}")
    return stated


def _command(texts: Mapping[str, str], overrides: list[str], run: bool) -> str:
    """Return the command line that asks what the fields ask."""
    words = ["moefold", "plan", texts["model"]]
    for field in FIELDS:
        by_override = run and field.name in OPTIONS
        if field.option.startswith("--") and field.name in texts and not by_override:
            words += [field.option, texts[field.name]]
    return shlex.join([*words, *overrides])


# ----------------------------------------------------------------------------- errors


def _blamed(texts: Mapping[str, str], field: str, step: Callable[[], Result]) -> Result:
    """Return what a step returns; its errors are about ``field``, unless they say another."""
    try:
        return step()
    except RunError as error:
        complaints = [_violated(texts, one, error.source) for one in error.violations]
        raise RefusedQuestion(complaints) from None
    except (ValueError, OSError) as error:
        raise RefusedQuestion([_complaint(texts, str(error), field)]) from None


def _complaint(texts: Mapping[str, str], message: str, field: str) -> Complaint:
    """Return a message as a complaint about the field that its first words name."""
    found = next((name for start, name in STARTS if message.startswith(start)), field)
    if "needs --batch" in message:
        found = "batch"
    if message.startswith("override "):
        key = message.removeprefix("override ").partition("=")[0]
        found = _field_of_key(key) or "overrides"
    nearest = nearest_in(message)
    if found == "layout":
        sizes = re.search(r"set layout.sizes to '(.*?)'", message)
        nearest = sizes and sizes[1]
    if found == "cluster" and nearest is None:
        example = re.search(r"such as (\w+x\d+)", message)
        nearest = example and example[1]
    if found == "cluster" and nearest is not None and "x" not in nearest.lower():
        number = re.search(r"x\s*\d+$", texts["cluster"])
        nearest = f"{nearest.lower()}{number[0] if number else 'x8'}"
    return Complaint(found, message, nearest)


def _violated(texts: Mapping[str, str], violation: Violation, source: str) -> Complaint:
    """Return a violation of a run as a complaint about the field that stated the value."""
    key = ".".join(str(part) for part in violation.path)
    if source.startswith("adapter="):
        key = f"adapter.{key}"
    field = _field_of_key(key)
    if field is None or field not in texts:
        where = violation.where
        field = "overrides" if where and where in texts.get("overrides", "") else "model"
    nearest = violation.nearest
    # A value inside a field's text cannot replace the text.
    own = BY_NAME[field].option.removesuffix("=")
    is_word = key == f"{own}.kind" and "{" not in texts.get(field, "")
    whole = key == own or is_word or field in ("batch", "seq")
    if nearest is MISSING or not whole:
        text = None
    else:
        text = "" if isinstance(nearest, Remove) or nearest is None else str(nearest)
    lines = (line.strip() for line in format_violation(violation))
    return Complaint(field, "\n".join(lines), text)


def _field_of_key(key: str) -> str | None:
    """Return the field of a key of a run file, or of a key above it."""
    parts = key.split(".")
    above = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((KEYS[one] for one in above if one in KEYS), None)


def nearest_in(message: str) -> str | None:
    """Return the nearest legal value that a message states."""
    found = _NEAREST.search(message)
    return found and found[1].strip().strip("'\"")
