"""Checks before a run resumes: it computes what its checkpoint did, and all ranks agree."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint.errors import CheckpointError
from moefold.comm.agree import require_same
from moefold.comm.world import World
from moefold.config.base import to_dict
from moefold.config.check import check
from moefold.config.dump import to_portable_dict
from moefold.config.errors import FieldPath, dotted
from moefold.config.fields import FieldSpec, basename, iter_file_paths, set_at
from moefold.config.plugins import import_plugins
from moefold.data.loader import same_data
from moefold.model.config import Decoder
from moefold.run import FREE_IN_IDENTITY, IDENTITY, Run
from moefold.spec.tuning import without_tuning

PACKAGE = Path(__file__).parents[1]


@cache
def code_version() -> str:
    """Return the first 16 digits of a SHA-256 of every Python file of the package and its name."""
    digest = sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# Computed at import, thus in the server that ranks fork from: files may change during a run, but a
# restarted rank runs the code that the server has loaded.
code_version()


def plugin_digests(run: Run) -> dict[str, str]:
    """Import the files of ``uses``; return their SHA-256 by file name, without the folder."""
    digests_by_name: dict[str, list[str]] = {}
    for path, digest in import_plugins(run.uses).items():
        digests_by_name.setdefault(Path(path).name, []).append(digest)
    return {f"uses: {name}": " ".join(digests) for name, digests in digests_by_name.items()}


def check_same_run(
    path: Path, meta: Mapping[str, Any], run: Run, plugins: Mapping[str, str], data_fingerprint: str
) -> None:
    """Check that ``run`` computes what the run of a checkpoint with this ``meta`` computed.

    ``plugins`` has the digests of the run's plug-in files by name.

    Raises:
        ValueError: if it does not; lists every difference.
        CheckpointError: if the checkpoint is an imported model without a run.
    """
    if "run" not in meta:
        raise CheckpointError(
            f"{path} is an imported model, not a run to resume; start a run from its weights: "
            f"moefold train RUN --folder {path.parent} --fork NEW"
        )
    changes = differences(with_current_defaults(meta["run"], run), to_dict(run))
    changes += differences(meta["parts"], plugins, tuple({**plugins, **meta["parts"]}))
    if not same_data(meta["data"], data_fingerprint) and not any(
        line.startswith("data.") for line in changes
    ):
        changes.append("data: the tokens or the tokenizer differ from the checkpoint's")
    model = check(Decoder, meta.get("decoder")).record
    if not changes and model not in (None, without_tuning(run.decoder)):
        changes.append("model: its description (config.json or code) differs from the checkpoint's")
    if changes:
        raise ValueError(
            f"{path} belongs to a run with other settings (stored -> this run):\n  "
            + "\n  ".join(changes)
            + "\nUse another --folder, or start a new run from it with --fork NEW"
        )


def check_ranks_agree(
    run: Run, plugins: Mapping[str, str], data_fingerprint: str, world: World
) -> None:
    """Check that all ranks have the same torch, package, data, run file and plug-ins.

    Raises:
        Disagreement: if they do not; names what differs, its values, and their ranks.
    """
    facts = {
        "torch": torch.__version__,
        "moefold": code_version(),
        "data": data_fingerprint,
        **{f"run.{key}": value for key, value in to_portable_dict(run).items()},
        **plugins,
    }
    require_same(facts, world.on_host)


def run_digest(run: Run, plugins: Mapping[str, str], data_fingerprint: str, num_ranks: int) -> str:
    """Return a digest of what a run computes and of its layout, data, plug-ins and ranks."""
    record = to_portable_dict(run)
    computed = {key: record[key] for key in (*IDENTITY, "layout")}
    for key, inner in FREE_IN_IDENTITY:
        computed[key] = {name: value for name, value in computed[key].items() if name != inner}
    facts = [computed, dict(plugins), data_fingerprint, num_ranks]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def with_current_defaults(stored: Mapping[str, Any], run: Run) -> Mapping[str, Any]:
    """Return a checkpoint's run with fields that were added since then at their defaults.

    A file path with the same last part as ``run``'s counts as the same file, moved. A run that
    today's records no longer accept is returned without defaults.
    """
    spec = FieldSpec(Run)
    present = {path: text for path, text, _ in iter_file_paths(spec, to_dict(run))}
    for path, text, _ in list(iter_file_paths(spec, stored)):
        if path in present and basename(text) == basename(present[path]):
            stored = set_at(stored, path, present[path])
    record = check(Run, stored).record
    return stored if record is None else to_dict(record)


def differences(
    stored: Mapping[str, Any], present: Mapping[str, Any], keys: Sequence[str] = IDENTITY
) -> list[str]:
    """Return where two runs differ in ``keys``, as lines ``path: stored -> present``."""
    lines: list[str] = []

    def compare(path: FieldPath, stored: Any, present: Any) -> None:
        if path in FREE_IN_IDENTITY or stored == present:
            return
        if isinstance(stored, list) and isinstance(present, list) and len(stored) == len(present):
            for number, entries in enumerate(zip(stored, present, strict=True)):
                compare((*path, number), *entries)
        elif isinstance(stored, Mapping) and isinstance(present, Mapping):
            for key in dict.fromkeys([*stored, *present]):
                compare((*path, key), stored.get(key), present.get(key))
        else:
            lines.append(f"{dotted(path)}: {stored} -> {present}")

    for key in keys:
        compare((key,), stored.get(key), present.get(key))
    return lines
