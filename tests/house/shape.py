"""Rules about the shape of code: sizes, records, what is documented, what is never written."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.house.tree import Module, dotted, functions, modules

FILE_LINES = 700
FUNCTION_LINES = 100
FUNCTION_LINES_P90 = 50
RECORD_FIELDS = 15
RECORD_BOOLEANS = 4

# What api.py offers as a type, not as a name of the package.
NOT_HANDED_ON = {"Result"}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = FunctionNode | ast.ClassDef


def file_sizes(root: Path) -> list[str]:
    """A file has at most FILE_LINES lines."""
    sized = [(module, module.source.count("\n")) for module in modules(root).values()]
    return [
        module.at(lines, f"{lines} lines; a file has at most {FILE_LINES}")
        for module, lines in sized
        if lines > FILE_LINES
    ]


def function_lines(node: FunctionNode) -> int:
    """Count a function's lines, signature and docstring included, decorators not."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def is_device_code(node: FunctionNode) -> bool:
    """Say whether a function is compiled for an accelerator, where long bodies are usual."""
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(dotted(name) in ("triton.jit", "jit") for name in calls)


def _sized_functions(root: Path) -> list[tuple[int, Module, FunctionNode]]:
    """Measure every function that runs on the host."""
    return [
        (function_lines(node), module, node)
        for module in modules(root).values()
        for node in functions(module.nodes)
        if not is_device_code(node)
    ]


def function_sizes(root: Path) -> list[str]:
    """A function has at most FUNCTION_LINES lines."""
    return [
        module.at(node.lineno, f"{node.name} has {lines} lines, at most {FUNCTION_LINES} are fine")
        for lines, module, node in _sized_functions(root)
        if lines > FUNCTION_LINES
    ]


def function_p90(root: Path) -> list[str]:
    """Nine functions in ten have at most FUNCTION_LINES_P90 lines."""
    sized = sorted(_sized_functions(root), key=lambda found: found[0])
    above = [found for found in sized if found[0] > FUNCTION_LINES_P90]
    if 10 * len(above) <= len(sized):
        return []
    names = [module.at(node.lineno, f"{node.name} ({lines})") for lines, module, node in above]
    start = f"{len(above)} of {len(sized)} functions exceed {FUNCTION_LINES_P90} lines: "
    return [start + ", ".join(names)]


def one_value_a_line(root: Path) -> list[str]:
    """Values are assigned one by one, unless one of them reads what another replaces (a swap)."""
    found = []
    for module in modules(root).values():
        for node in module.nodes:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
                continue
            target = node.targets[0]
            if not isinstance(target, ast.Tuple):
                continue
            replaced = {ast.unparse(part) for part in target.elts}
            read = {
                ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)
            }
            if not replaced & read:
                found.append(module.at(node.lineno, f"{ast.unparse(target)}: a line for each"))
    return found


@cache
def _classes(root: Path) -> dict[str, tuple[Module, ast.ClassDef]]:
    """Map full dotted names to the classes at the top of files."""
    return {
        f"{module.name}.{node.name}": (module, node)
        for module in modules(root).values()
        for node in module.syntax.body
        if isinstance(node, ast.ClassDef)
    }


def one_meaning(root: Path) -> list[str]:
    """A class name stands for one class of the package."""
    homes: dict[str, list[tuple[Module, ast.ClassDef]]] = defaultdict(list)
    for module, node in _classes(root).values():
        homes[node.name].append((module, node))
    return [
        module.at(node.lineno, f"class {name} is also one of {first.path}")
        for name, ((first, _), *others) in homes.items()
        for module, node in others
    ]


@cache
def _imported_names(module: Module) -> dict[str, str]:
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.level == 0
        for alias in node.names
    }


def ancestry(name: str, classes: dict[str, tuple[Module, ast.ClassDef]]) -> Iterator[str]:
    """Yield the full names of a class and of all its bases, those of the package walked through."""
    yield name
    if name not in classes:
        return
    module, node = classes[name]
    names = _imported_names(module)
    for base in node.bases:
        written = dotted(base)
        local = f"{module.name}.{written}"
        yield from ancestry(local if local in classes else names.get(written, written), classes)


def _fields(node: ast.ClassDef) -> dict[str, str]:
    """Map a record's own fields to their annotations as text; class variables are none."""
    return {
        item.target.id: ast.unparse(item.annotation)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if not ast.unparse(item.annotation).startswith(("ClassVar", "typing.ClassVar"))
    }


def record_sizes(root: Path) -> list[str]:
    """A configuration record is small, inherited fields counted, and never rewrites itself."""
    classes, breaches = _classes(root), []
    for name, (module, node) in classes.items():
        lineage = list(dict.fromkeys(ancestry(name, classes)))
        if not any(base.endswith("config.base.Record") for base in lineage[1:]):
            continue
        fields: dict[str, str] = {}
        for base in reversed(lineage):
            if base in classes:
                fields |= _fields(classes[base][1])
        booleans = [f for f, kind in fields.items() if "bool" in kind.replace("|", " ").split()]
        if len(fields) > RECORD_FIELDS:
            text = f"{node.name} has {len(fields)} fields; a record has at most {RECORD_FIELDS}"
            breaches.append(module.at(node.lineno, text))
        if len(booleans) > RECORD_BOOLEANS:
            text = (
                f"{node.name} has {len(booleans)} booleans, at most {RECORD_BOOLEANS}: {booleans}"
            )
            breaches.append(module.at(node.lineno, text))
        for item in node.body:
            if isinstance(item, FunctionNode) and item.name in ("__post_init__", "model_post_init"):
                text = f"{node.name}.{item.name}: a record never rewrites what was given"
                breaches.append(module.at(item.lineno, text))
    return breaches


def never_written(root: Path) -> list[str]:
    """No ``global``, no ``hasattr``, no bare or blanket silencing of errors."""
    breaches = []
    for module in modules(root).values():
        for node in module.nodes:
            if isinstance(node, ast.Global):
                breaches.append(module.at(node.lineno, f"global {', '.join(node.names)}"))
            elif isinstance(node, ast.Call) and dotted(node.func) == "hasattr":
                breaches.append(module.at(node.lineno, "hasattr: ask for the type instead"))
            elif isinstance(node, ast.ExceptHandler) and _silences(node):
                breaches.append(module.at(node.lineno, "catches everything and says nothing"))
    return breaches


def _silences(handler: ast.ExceptHandler) -> bool:
    blanket = handler.type is None or dotted(handler.type) in ("Exception", "BaseException")
    return blanket and all(isinstance(item, ast.Pass) for item in handler.body)


def empty_inits(root: Path) -> list[str]:
    """An ``__init__.py`` is empty; the package's own hands names on lazily and imports none."""
    breaches = []
    for name, module in modules(root).items():
        if not module.path.endswith("__init__.py"):
            continue
        if name != "moefold":
            if module.source.strip():
                breaches.append(module.at(1, "is not empty: import from the file that defines"))
            continue
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom | ast.Import):
                text = ast.unparse(node)
                if "moefold" in text or isinstance(node, ast.Import):
                    breaches.append(module.at(node.lineno, f"{text}: names are handed on lazily"))
    return breaches


def handed_on(root: Path) -> list[str]:
    """``import moefold`` hands on every public name of api.py, and none that is not there."""
    known = modules(root)
    package, api = known.get("moefold"), known.get("moefold.api")
    if package is None:
        return []
    homes: dict[str, str] = {}
    for node in package.syntax.body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "_MODULES":
            homes = ast.literal_eval(node.value)
    breaches = [
        package.at(1, f"hands on {name} from {home}, which does not define it")
        for name, home in homes.items()
        if home not in known or name not in _defines(known[home])
    ]
    breaches += [
        package.at(1, f"does not hand on {name} of moefold/api.py")
        for name in (_defines(api) if api else [])
        if not name.startswith("_") and name not in NOT_HANDED_ON
        if homes.get(name) != "moefold.api"
    ]
    return breaches


def _defines(module: Module) -> list[str]:
    return [node.name for node in module.syntax.body if isinstance(node, Definition)]


def documented(root: Path) -> list[str]:
    """Every public module, class, function and method says what it is for."""
    classes, breaches = _classes(root), []
    for module in modules(root).values():
        empty = not module.syntax.body
        if not empty and ast.get_docstring(module.syntax) is None:
            breaches.append(module.at(1, "the file has no docstring"))
        for owner, node in public(module):
            if ast.get_docstring(node) is None and not _inherits(module, owner, node, classes):
                breaches.append(module.at(node.lineno, f"{node.name} has no docstring"))
    return breaches


def annotated(root: Path) -> list[str]:
    """Every argument and result of public functions and methods is annotated."""
    breaches = []
    for module in modules(root).values():
        for owner, node in public(module, with_init=True):
            if isinstance(node, ast.ClassDef):
                continue
            missing = _unannotated(node, bound=owner is not None)
            if missing:
                text = f"{node.name} leaves {', '.join(missing)} without annotation"
                breaches.append(module.at(node.lineno, text))
    return breaches


def public(
    module: Module, with_init: bool = False
) -> Iterator[tuple[ast.ClassDef | None, Definition]]:
    """Yield what a file offers: top-level functions and classes, and public classes' methods."""
    for node in module.syntax.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        yield None, node
        if not isinstance(node, ast.ClassDef):
            continue
        for item in node.body:
            if not isinstance(item, FunctionNode) or _is_overload(item):
                continue
            if not item.name.startswith("_") or (with_init and item.name == "__init__"):
                yield node, item


def _is_overload(node: FunctionNode) -> bool:
    return any(dotted(d) in ("overload", "typing.overload") for d in node.decorator_list)


def _inherits(
    module: Module,
    owner: ast.ClassDef | None,
    node: Definition,
    classes: dict[str, tuple[Module, ast.ClassDef]],
) -> bool:
    """Say whether a method fulfils one that a base class of the package documents."""
    if owner is None:
        return False
    for base in list(ancestry(f"{module.name}.{owner.name}", classes))[1:]:
        for item in classes[base][1].body if base in classes else []:
            if isinstance(item, FunctionNode) and item.name == node.name:
                return ast.get_docstring(item) is not None
    return False


def _unannotated(node: FunctionNode, bound: bool) -> list[str]:
    arguments = [*node.args.posonlyargs, *node.args.args]
    static = any(dotted(d) == "staticmethod" for d in node.decorator_list)
    if bound and not static:
        arguments = arguments[1:]
    arguments += node.args.kwonlyargs
    arguments += [extra for extra in (node.args.vararg, node.args.kwarg) if extra]
    missing = [argument.arg for argument in arguments if argument.annotation is None]
    if node.returns is None and node.name != "__init__":
        missing.append("its result")
    return missing
