"""Fitting of the time model's constants: few, of devices and stacks alone, in logarithms.

Each has a prior, so that what the rows do not decide stays where physics puts it. Large residuals
count less (Huber), so that an odd row bends nothing.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from planning.rows import Row

from moefold.planner.curves import Constants
from moefold.planner.time import estimate_time

FILE = Path(__file__).parents[2] / "moefold" / "planner" / "time_constants.json"
KERNELS = "cuDNN attention of DeepSeek-V3's dims, arXiv 2603.07685 table 9"
TABLE7 = "dispatch and combine of arXiv 2603.07685 table 7, by hand"
SOURCED: dict[str, tuple[float, str]] = {
    "hopper.forward_rate": (0.68, KERNELS),
    "hopper.forward_half": (886.0, KERNELS),
    "hopper.backward_rate": (0.574, KERNELS),
    "hopper.backward_half": (1418.0, KERNELS),
    "hopper.link": (0.74, TABLE7),
    "hopper.link_fused": (0.9, TABLE7),
    "hopper.link_deepep": (0.9, "DeepEP's README: 153-158 of 160 GB/s on H800, links alone"),
    "B200.link_deepep": (0.8, "DeepEP's README: 726 of 900 GB/s among eight of this generation"),
    "cdna.gemm": (
        0.542,
        "AMD's max-achievable 708 of 1,307 TFLOP/s in bf16 on MI300X (ROCm blogs; TraceLens)",
    ),
} | {
    f"{family}.{name}": value
    for family in ("blackwell", "blackwell_ultra")
    for name, value in (
        ("forward_rate", (0.75, KERNELS)),
        ("forward_half", (1703.0, KERNELS)),
        ("backward_rate", (0.556, KERNELS)),
        ("backward_half", (1161.0, KERNELS)),
        ("link", (0.62, TABLE7)),
        ("link_fused", (0.74, TABLE7)),
        ("link_deepep", (0.29, "arXiv 2603.07685: 400 GB/s dispatch and 190 GB/s combine, GB200")),
    )
}  # fmt: skip
"""Constants that a source gives, and which."""
PRIORS: dict[str, tuple[float, float]] = {
    "hopper.gemm": (0.75, 0.15),
    "blackwell.gemm": (0.75, 0.15),
    "blackwell_ultra.gemm": (0.80, 0.15),
    "common.half": (150.0, 0.5),
    "hopper.narrow": (0.8, 0.15),
    "blackwell.narrow": (0.8, 0.15),
    "blackwell_ultra.narrow": (0.8, 0.15),
    "common.scan": (2.0, 0.5),
    "common.narrow_attention": (1.3, 0.15),
    "hopper.memory": (0.75, 0.3),
    "blackwell.memory": (0.70, 0.3),
    "blackwell_ultra.memory": (0.75, 0.3),
    "hopper.quantise": (1.5, 0.5),
    "blackwell.quantise": (1.5, 0.5),
    "blackwell_ultra.quantise": (1.5, 0.5),
    "x86.launch_s": (2.5e-5, 0.4),
    "grace.launch_s": (3.5e-5, 0.4),
    "common.kernel_s": (2e-6, 0.5),
    "common.fused": (0.5, 0.5),
    "common.nic_exchange": (0.82, 0.1),
    "common.nic_gather": (0.85, 0.2),
    "common.nic_context": (0.85, 0.2),
    "common.permute": (1.0, 0.3),
    "common.hidden": (0.9, 0.15),
    "common.hidden_shards": (0.8, 0.3),
    "megatron mpf.hidden_shards": (0.4, 0.5),
    "common.device": (1.0, 0.3),
    "common.launches": (1.0, 0.5),
    "common.step_s": (0.03, 0.5),
    "megatron card.step_s": (0.2, 0.5),
}
"""Constants that are fitted: prior, and its standard deviation as a logarithm."""
FAMILY_WORDS = {"hopper": ("H100", "H800", "H200"), "blackwell": ("B200", "GB200"),
                "blackwell_ultra": ("GB300", "B300"), "grace": ("GB200", "GB300"),
                "x86": ("H100", "H800", "H200", "B200")}  # fmt: skip
"""Devices of each family and kind of host."""
STACK_SPREAD = {"device": 0.3, "launches": 0.5}
"""How far a stack may be from the middle of all, ``common``, as a logarithm."""
RELEASE_SPREAD = {"device": 0.15, "launches": 0.25}
"""How far a release of a stack may be: less, as most of its code is that of the others."""
HOSTS = ("grace", "x86")
LEAST_ROWS = 3
"""Rows of a kind of host from which a release's factor on launches is applied on that host."""
SHARE_MAX = {
    "gemm": 0.97,
    "narrow": 1.0,
    "memory": 0.95,
    "hidden": 0.98,
    "hidden_shards": 1.0,
    "nic_exchange": 1.0,
    "nic_gather": 1.0,
    "nic_context": 1.0,
}
"""Shares stay below one."""
NOISE = 0.05
"""What two runs of one setting differ by, as a logarithm: the sources' own spread is 2 to 5 %."""
HUBER = 2.0


def stacks_of(rows: Sequence[Row]) -> list[str]:
    """Return the stacks of rows."""
    return sorted({row.stack for row in rows})


def priors_for(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return every constant that a fit of these rows has."""
    found = dict(PRIORS)
    for stack in stacks_of(rows):
        spread = RELEASE_SPREAD if " " in stack else STACK_SPREAD
        for name in STACK_SPREAD:
            found[f"{stack}.{name}"] = 1.0, spread[name]
    return found


def hosts_without_rows(rows: Sequence[Row]) -> list[str]:
    """Return stacks with a kind of host on which too few of their rows ran: ``megatron 26.06 x86``.

    What such a stack's rows say of launches is not applied there.
    """
    found: list[str] = []
    for stack in stacks_of(rows):
        own = [row.host for row in rows if row.stack == stack]
        found += [f"{stack} {host}" for host in HOSTS if own.count(host) < LEAST_ROWS]
    return found


def middle_of(name: str) -> str | None:
    """Return the constant of all stacks that a stack's own is a factor on, if it is one."""
    scope, _, last = name.rpartition(".")
    common = f"common.{last}"
    is_stack = last in STACK_SPREAD and scope not in ("common", *FAMILY_WORDS)
    return common if is_stack else None


def made(names: Sequence[str], logs: np.ndarray) -> Constants:
    """Return constants from logarithms of the fitted ones; those of stacks are factors."""
    values = {name: value for name, (value, _) in SOURCED.items()}
    fitted = dict(zip(names, logs, strict=True))
    for name, log in fitted.items():
        middle = middle_of(name)
        value = float(np.exp(log + (fitted[middle] if middle else 0.0)))
        limit = SHARE_MAX.get(name.split(".")[-1])
        values[name] = min(value, limit) if limit else value
    return Constants(values, {"measured": 0.1, "one": 0.2, "none": 0.3})


def _start_logs(priors: dict[str, tuple[float, float]], start: dict[str, float]) -> np.ndarray:
    """Return logarithms of values to start from; those of stacks are factors on the middle."""
    logs = dict[str, float]()
    for name, (prior, _) in priors.items():
        middle = middle_of(name)
        given = name in start and (middle is None or middle in start)
        value = start[name] / (start[middle] if middle else 1.0) if given else prior
        logs[name] = float(np.log(value))
    return np.array(list(logs.values()))


def _limited(names: Sequence[str], logs: np.ndarray) -> np.ndarray:
    """Return logarithms of which no share exceeds its limit."""
    limits = [SHARE_MAX.get(name.split(".")[-1], np.inf) for name in names]
    return np.minimum(logs, np.log(limits))


def residuals(rows: Sequence[Row], given: Constants) -> np.ndarray:
    """Return the logarithm of published over predicted speed, in units of the noise."""
    found = [np.log(estimate_time(row.case, given).seconds / row.seconds) for row in rows]
    return np.array(found) / NOISE


def weight(row: Row) -> float:
    """Return what a row counts: rounded and conflicting sources half, tiny steps too."""
    return 0.5 if row.raw.get("reliability") == "C" else 1.0


def fit(
    rows: Sequence[Row],
    start: dict[str, float] | None = None,
    rounds: int = 8,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """Return the fitted constants by name: damped Gauss-Newton with priors.

    Args:
        start: values to start from, such as those of a fit of more rows.
        rounds: steps at most.
    """
    priors = priors_for(rows)
    names = list(priors)
    middle = np.log([priors[name][0] for name in names])
    spread = np.array([priors[name][1] for name in names])
    logs = _start_logs(priors, start or {})
    weights = np.array([weight(row) for row in rows])
    damping, now = 0.1, residuals(rows, made(names, logs))
    cost = _cost(now, weights, logs, middle, spread)
    for turn in range(rounds):
        slopes = _slopes(rows, names, logs, now)
        # Huber: beyond HUBER a residual counts linearly.
        far = np.maximum(np.abs(now), 1e-9)
        kept = weights * np.minimum(1.0, HUBER / far)
        normal = slopes.T @ (slopes * kept[:, None]) + np.diag(1 / spread**2)
        pull = slopes.T @ (now * kept) + (logs - middle) / spread**2
        better = False
        for _ in range(5):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -pull)
            tried = _limited(names, logs + np.clip(step, -0.5, 0.5))
            then = residuals(rows, made(names, tried))
            found = _cost(then, weights, tried, middle, spread)
            if found < cost:
                better = cost - found > 5e-4 * cost
                logs, now, cost, damping = tried, then, found, damping / 3
                break
            damping *= 4
        tell(f"round {turn}: cost {cost:.1f}, median {np.median(np.abs(now)) * NOISE:.3f}")
        if not better:
            break
    given = made(names, logs)
    return {name: given.values[name] for name in names}


def support(rows: Sequence[Row], values: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Return what fixes each fitted constant at given values.

    For each: the number of rows that it moves, the share of what is known of it that is theirs
    rather than the prior's, and the models that most of that is from, with their shares.
    """
    priors = priors_for(rows)
    names = list(priors)
    logs = _start_logs(priors, values)
    now = residuals(rows, made(names, logs))
    slopes = _slopes(rows, names, logs, now)
    counted = np.array([weight(row) for row in rows])
    counted *= np.minimum(1.0, HUBER / np.maximum(np.abs(now), 1e-9))
    known = counted[:, None] * slopes**2
    found: dict[str, dict[str, Any]] = {}
    for name, by_row in zip(names, known.T, strict=True):
        total = float(by_row.sum())
        models: dict[str, float] = {}
        for row, part in zip(rows, by_row, strict=True):
            models[row.raw["model"]] = models.get(row.raw["model"], 0.0) + float(part)
        first = sorted(models, key=lambda model: -models[model])[:3]
        found[name] = {
            "rows": int((by_row > 0).sum()),
            "share": round(total / (total + priors[name][1] ** -2), 3),
            "models": {model: round(models[model] / total, 2) for model in first if total},
        }
    return found


def _cost(now: np.ndarray, weights: np.ndarray, logs, middle, spread) -> float:
    size = np.abs(now)
    huber = np.where(size < HUBER, size**2, HUBER * (2 * size - HUBER))
    return float(np.sum(weights * huber) + np.sum(((logs - middle) / spread) ** 2))


def _slopes(
    rows: Sequence[Row], names: Sequence[str], logs: np.ndarray, now: np.ndarray
) -> np.ndarray:
    """Return the derivative of residuals; a stack's constants touch its own rows alone."""
    # Downwards: above its limit a share has no slope.
    step, slopes = -0.01, np.zeros((len(rows), len(names)))
    for j, name in enumerate(names):
        moved = logs.copy()
        moved[j] += step
        given = made(names, moved)
        scope = name.rpartition(".")[0]
        own = [i for i, row in enumerate(rows) if _touches(scope, row)]
        if own:
            slopes[own, j] = (residuals([rows[i] for i in own], given) - now[own]) / step
    return slopes


def _touches(scope: str, row: Row) -> bool:
    if scope == "common":
        return True
    if scope in FAMILY_WORDS:
        return row.raw["gpu"] in FAMILY_WORDS[scope]
    return scope == row.stack


def constants_with(fitted: dict[str, float], rows: Sequence[Row]) -> Constants:
    """Return fitted and sourced constants together; devices of the rows count as measured."""
    values = {name: value for name, (value, _) in SOURCED.items()} | fitted
    values |= {f"{scope}.launches": fitted["common.launches"] for scope in hosts_without_rows(rows)}
    values |= {f"{row.raw['gpu']}.measured": 1.0 for row in rows}
    return Constants(values, {"measured": 0.1, "one": 0.2, "none": 0.3})


def save(fitted: dict[str, float], rows: Sequence[Row], spread: dict[str, float]) -> None:
    """Write the one file of constants, each with its source."""
    count: dict[str, int] = {}
    for name in fitted:
        count[name] = sum(_touches(name.rpartition(".")[0], row) for row in rows)
    entries = {name: [value, source] for name, (value, source) in SOURCED.items()}
    entries |= {
        name: [float(f"{value:.6g}"), f"fit of {count[name]} rows by bench/plan_accuracy.py --fit"]
        for name, value in fitted.items()
    }
    middle = float(f"{fitted['common.launches']:.6g}")
    entries |= {
        f"{scope}.launches": [middle, "that of all stacks: too few rows of this host were fitted"]
        for scope in hosts_without_rows(rows)
    }
    entries |= {
        f"{gpu}.measured": [1.0, "rows of this device were fitted"]
        for gpu in sorted({row.raw["gpu"] for row in rows})
    }
    stored = {
        "about": "Constants of the time model by scope and name, each [value, source]. Written by "
        "bench/plan_accuracy.py --fit; scopes are device families, hosts and software releases.",
        "spread": {name: round(value, 3) for name, value in spread.items()},
        "constants": dict(sorted(entries.items())),
    }
    text = json.dumps(stored, indent=1)
    FILE.write_text(text + "\n", "utf-8")
