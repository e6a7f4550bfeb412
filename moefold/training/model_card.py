"""The model card of an exported folder: data, figures, layout, licence, and how to serve it.

The metadata at its head is what the Hugging Face Hub reads. Files of data are named without their
folders, which are those of this machine.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from moefold.checkpoint.errors import CheckpointError
from moefold.convert.plan import Dtype
from moefold.model.config import Decoder
from moefold.model.families.names import Layout
from moefold.model.families.registry import family_of
from moefold.planner.count import count
from moefold.spec.decoder import routings
from moefold.training.formatting import count as short
from moefold.training.hooks.logs import RUN_FILE
from moefold.training.model_checkpoint import StoredModel
from moefold.training.report import summary
from moefold.training.run_folder import History

README = "README.md"
BASE_README = "README.base.md"
BASE_LIMIT = 256 * 2**10
"""Largest card of a base model, in bytes, that is kept; the rest of a larger one is cut off."""
STORED_CARD = "base_card"
"""Key, in an imported checkpoint's meta, of the folder's own card."""
_HUB_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)$")
"""Folder of a model in the cache of the Hub's client, which has its name."""
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``--max-lora-rank`` (0.26, ``vllm/config/lora.py``)."""


def read_base_card(folder: Path) -> str | None:
    """Return the card in a model's folder, None if there is none."""
    path = folder / README
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(BASE_LIMIT).decode("utf-8", errors="ignore")


def left_behind(stored: StoredModel) -> list[str]:
    """Return a note if the base model has a card, which an export without cards does not have."""
    theirs = _base_card(stored, _base_of(stored))
    return ["the card of the base model is not copied (--no-card)"] if theirs else []


def card_files(stored: StoredModel, dtype: Dtype, layout: Layout, adapter: bool) -> dict[str, str]:
    """Return the files of a card, by name: its own, and that of the base model if there is one."""
    base = _base_of(stored)
    theirs = _base_card(stored, base)
    lines = [*_metadata(base, adapter), *_model(stored, dtype, layout, adapter, base)]
    lines += [*_training(stored), *_data(stored.meta.get("run") or {})]
    lines += ["## Licence", "", "Unknown: write the licence here, and in `license` above.", ""]
    if theirs:
        lines += [f"The card of the base model, with its licence, is in `{BASE_README}`.", ""]
    lines += _serving(stored, adapter, base)
    files = {README: "\n".join(lines)}
    if theirs:
        files[BASE_README] = str(theirs)
    return files


def _base_card(stored: StoredModel, base: str | None) -> Any:
    """Return the base model's card, as stored or in its folder; None if it has none."""
    if card := stored.meta.get(STORED_CARD):
        return card
    return read_base_card(Path(base)) if base else None


def _base_of(stored: StoredModel) -> str | None:
    """Return the Hugging Face folder from which a run started, if it started from one."""
    model = (stored.meta.get("run") or {}).get("model") or {}
    base = model.get("from") if model.get("family") == "folder" else None
    return base if isinstance(base, str) else None


def _hub_name(base: str | None) -> str | None:
    """Return the base model's name on the Hub, if its folder is in the Hub's cache."""
    found = (_HUB_CACHE.search(part) for part in Path(base or "").parts)
    return next((f"{match[1]}/{match[2]}" for match in found if match), None)


def _metadata(base: str | None, adapter: bool) -> Iterator[str]:
    fields: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "license": "unknown",
        "tags": ["moefold", "moe", *(["lora"] if adapter else [])],
    }
    if name := _hub_name(base):
        fields["base_model"] = name
        fields["base_model_relation"] = "adapter" if adapter else "finetune"
    yield from ("---", yaml.safe_dump(fields, sort_keys=False).strip(), "---", "")


def _model(
    stored: StoredModel, dtype: Dtype, layout: Layout, adapter: bool, base: str | None
) -> Iterator[str]:
    decoder = stored.decoder
    counts = count(stored.decoder)
    name = _plain((stored.meta.get("run") or {}).get("name") or stored.path.parent.name)
    yield from (f"# {name}", "")
    if adapter:
        yield from (f"Low-rank adapters of `{_plain(Path(base or '').name)}`, for PEFT.", "")
    rows = {
        "family": f"`{family_of(decoder).model_type}`",
        "parameters": f"{short(counts.parameters)}, {short(counts.active_parameters)} per token",
        "layers": f"{decoder.layers}, hidden size {decoder.hidden}",
        "experts": _experts(decoder),
        "vocabulary": f"{decoder.vocab} rows",
        "context": "not stated" if decoder.context is None else f"{decoder.context} tokens",
        "stored as": f"{dtype}" if adapter else f"{dtype}, {_LAYOUTS[layout]}",
    }
    yield from _table(("", ""), rows.items())


_LAYOUTS = {"per_expert": "a tensor per expert", "packed": "one tensor for all experts"}


def _experts(decoder: Decoder) -> str:
    """Return numbers of experts and chosen ones of a decoder's layers."""
    layers = routings(decoder)
    kinds = dict.fromkeys(f"{layer.top_k} of {layer.experts}" for layer in layers)
    return f"{' and '.join(kinds)} per token in {len(layers)} layers" if layers else "none"


def _training(stored: StoredModel) -> Iterator[str]:
    """Yield the section on steps, tokens and losses."""
    progress = stored.meta.get("progress") or {}
    if not progress.get("step"):
        return
    figures = _figures(stored)
    rows = {"steps": f"{progress['step']:,}", "tokens": f"{progress.get('tokens', 0):,}"}
    names = {"lm_loss": "training loss (nats per token)", "val_loss": "held-out loss"}
    for key, value in figures.items():
        is_loss = key in names or key.startswith(("val", "eval"))
        if is_loss and isinstance(value, float):
            rows[names.get(key, f"`{_plain(key)}`")] = f"{value:.4f}"
    train = (stored.meta.get("run") or {}).get("train") or {}
    for key in ("batch", "precision"):
        if train.get(key) is not None:
            rows[key if key != "batch" else "sequences per step"] = f"{train[key]}"
    yield from ("## Training", "", "Trained with moefold.", "")
    yield from _table(("", ""), rows.items())


def _figures(stored: StoredModel) -> Mapping[str, Any]:
    """Return the newest figures of a checkpoint's run up to its step; empty without its logs."""
    folder = stored.path.parent
    if not (folder / RUN_FILE).is_file():
        return {}
    try:
        history = History.read(folder)
    except (OSError, ValueError, CheckpointError):
        return {}
    step = (stored.meta.get("progress") or {}).get("step", 0)
    history.lines[:] = [line for line in history.lines if line.get("step", 0) <= step]
    return summary(history) if history.lines else {}


def _data(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section on the sources of a run's data."""
    data = run.get("data") or {}
    sources = data.get("train") or []
    if not sources:
        return
    rows = []
    for source in sources:
        files = [f"`{_plain(Path(str(file)).name)}`" for file in source.get("files") or ()]
        named = ", ".join(files[:5])
        if len(files) > 5:
            named += f" and {len(files) - 5} more"
        given = {key: source.get(key) for key in ("weight", "holdout", "epochs")}
        stated = {key: value for key, value in given.items() if value not in (None, 0, {}, [])}
        others = ", ".join(f"{key} {value}" for key, value in stated.items())
        name = _plain(source.get("source", "?"))
        rows.append((f"`{name}`", named, others))
    yield from ("## Data", "")
    yield from _table(("source", "files", ""), rows)
    if data.get("seq"):
        yield from (f"In sequences of {data['seq']} tokens.", "")


def _serving(stored: StoredModel, adapter: bool, base: str | None) -> list[str]:
    """Return the section on programs that run the folder."""
    where = "FOLDER"
    if adapter:
        ranks = [tensor for name in stored.tensors.scales if (tensor := _rank(stored, name))]
        return [
            "## Use", "", "```python", "from peft import AutoPeftModelForCausalLM",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{where}")', "```", "",
            "```sh",
            f"vllm serve BASE --enable-lora --max-lora-rank {_vllm_rank(max(ranks, default=16))} "
            f"--lora-modules tuned={where}",
            f"python -m sglang.launch_server --model-path BASE --lora-paths tuned={where}",
            "```", "",
            "Programs that do not read adapters of experts take the merged model "
            "(`moefold export --merged`).", "",
        ]  # fmt: skip
    return [
        "## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'model = AutoModelForCausalLM.from_pretrained("{where}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{where}")', "```", "", "```sh",
        f"vllm serve {where}",
        f"python -m sglang.launch_server --model-path {where}",
        f"python convert_hf_to_gguf.py {where} --outfile model.gguf   # of llama.cpp",
        "llama-server -m model.gguf", "```", "",
        "llama.cpp knows the rules by which a tokenizer splits text (its pre-tokenizer) only for "
        "tokenizers in its list, which its converter recognises by a checksum. A tokenizer that "
        "was trained anew is refused as not recognised; one whose rules are taken for others "
        "gives other tokens. Compare `llama-tokenize` with `AutoTokenizer` before use.", "",
    ]  # fmt: skip


def _vllm_rank(rank: int) -> int:
    """Return the lowest rank that vLLM's option takes and that is not below ``rank``."""
    return min((each for each in _VLLM_RANKS if each >= rank), default=rank)


def _rank(stored: StoredModel, name: str) -> int:
    return stored.tensors.shape(name + "_lora_b")[-1]


def _table(head: Sequence[str], rows: Any) -> Iterator[str]:
    """Yield a table of Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(cells)} |" for cells in rows)
    yield ""


def _plain(text: Any) -> str:
    """Return a text on one line without characters that Markdown reads in a table."""
    return re.sub(r"[|`<>\s\x00-\x1f]+", " ", str(text)).strip()[:200]
