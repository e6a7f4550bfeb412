"""The banner before a run's first step: size, cost, chosen kernels, balancing, data, folder."""

import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moefold.kernels.fused import why_no_triton
from moefold.kernels.quantise.config import Quantise
from moefold.kernels.scaled.choose import PRODUCTS, describe_backends
from moefold.layers.precision import recipe_of
from moefold.model.decoder import DecoderModel
from moefold.model.families.folder import Folder, read_config
from moefold.moe.config import Bias
from moefold.optim.rates import describe_rate, rate_factor
from moefold.planner.plan import graph_bytes
from moefold.planner.time import newton_schulz_flops
from moefold.spec.decoder import model_weights, routings
from moefold.spec.layer import summary_of
from moefold.spec.quantised import quantised_weight_names
from moefold.training.formatting import clock, count, plural, si, size, step_time
from moefold.training.trainer import Trainer

Row = tuple[str, str]


def banner_rows(job: Trainer) -> list[Row]:
    """Return the banner's lines as (title, text); an empty title continues the line above."""
    lines = [*_model(job), *_cost(job), *_execution(job), ("balance", _balance(job)), *_data(job)]
    lines += [*_rate(job), ("folder", str(job.folder))]
    if job.resumed_from is not None:
        lines.append(("resumes", f"from {job.resumed_from.name}: step {job.step_number:,}"))
    return lines


def banner_facts(job: Trainer) -> dict[str, Any]:
    """Return the banner's figures for programs."""
    run = job.run
    counts = job.counts
    return {
        "name": run.name,
        "folder": str(job.folder),
        "resumed_from": str(job.resumed_from) if job.resumed_from else None,
        "step": job.step_number,
        "last_step": job.last_step,
        "parameters": counts.parameters,
        "active_parameters": counts.active_parameters,
        "flops_per_token": counts.flops_per_token(run.data.seq, causal=True),
        "flops_per_token_full_attention": counts.flops_per_token(run.data.seq, causal=False),
        "tokens_per_step": tokens_per_step(job),
        "least_step_time_s": min_step_time(job),
        "state_bytes": state_bytes(job),
        "machine_flops_per_s": job.utilisation.machine.flops_per_s,
        "ranks": job.world.size,
        "layout": job.run.layout.split.text,
        "device": str(job.device),
        "threads": torch.get_num_threads(),
        "rows": [list(row) for row in banner_rows(job)],
    }


def banner_panel(job: Trainer, extra_rows: Sequence[Row] = ()) -> Panel:
    """Return the banner for a terminal or a log, with ``extra_rows`` at its end."""
    return card(f"[bold]{job.run.name}[/] · moefold", [*banner_rows(job), *extra_rows], "cyan")


def card(title: str, rows: Iterable[tuple[str, str | Text]], colour: str) -> Panel:
    """Return a framed list of (title, text)."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text.assemble(text))
    return Panel(table, title=title, title_align="left", border_style=colour, expand=False)


def tokens_per_step(job: Trainer) -> int:
    """Return the number of tokens in a batch."""
    return job.run.train.batch * job.run.data.seq


def min_step_time(job: Trainer) -> float:
    """Return the seconds of a step's products on all ranks at the measured rate: a lower bound."""
    flops = job.counts.flops_per_token(job.run.data.seq, causal=True)
    flops_per_s = job.utilisation.machine.flops_per_s * job.world.size
    return tokens_per_step(job) * flops / flops_per_s


def state_bytes(job: Trainer) -> int:
    """Return the bytes of parameters, their gradients and the optimizer's state."""
    parameter_bytes = sum(p.nbytes * (1 + p.requires_grad) for p in job.model.parameters())
    optimizer_bytes = sum(tensor.nbytes for tensor in job.optimizer.state().values())
    return parameter_bytes + optimizer_bytes


def _model(job: Trainer) -> Iterator[Row]:
    counts = job.counts
    decoder = job.run.decoder
    active = counts.active_parameters
    model = job.run.model
    family = getattr(model, "family", type(model).__name__)
    if isinstance(model, Folder):
        family = f"{read_config(Path(model.path)).model.family} of {model.path}"  # type: ignore[attr-defined]
    percent = 100 * active / counts.parameters
    yield (
        "model",
        f"{family}: {count(counts.parameters)} parameters, {count(active)} active per token "
        f"({percent:.0f} %)",
    )
    kinds = Counter(summary_of(block.ffn) for block in decoder.blocks)
    layers = ", ".join(f"{number} × {kind}" for kind, number in kinds.items())
    yield "", f"layers: {layers}; hidden {decoder.hidden}, vocabulary {decoder.vocab}"
    frozen = [weight for weight in model_weights(decoder) if weight.frozen]
    if frozen:
        fixed = sum(weight.elements for weight in frozen)
        trained = count(counts.parameters - fixed)
        tensors = plural(len(frozen), "tensor")
        yield (
            "",
            f"trained: {trained} parameters; {count(fixed)} in {tensors} are frozen, without "
            "gradient and optimizer state",
        )
    leaves_by_adapter: dict[tuple[str, int, float], list[str]] = {}
    for adapter in chain.from_iterable(part.adapters for part in (decoder, *decoder.blocks)):
        path, _, leaf = adapter.weight.removesuffix(".weight").rpartition(".")
        leaves_by_adapter.setdefault((path, adapter.rank, adapter.scale), []).append(leaf)
    for number, ((path, rank, scale), leaves) in enumerate(leaves_by_adapter.items()):
        counts_text = ", ".join(f"{n} × {leaf}" for leaf, n in Counter(leaves).items())
        prefix = f"{path}: " if path else ""
        row = "" if number else "adapters"
        yield row, f"{prefix}{counts_text}, rank {rank}, scale {scale:g}"


def _cost(job: Trainer) -> Iterator[Row]:
    run = job.run
    seq = job.run.data.seq
    causal, full = (job.counts.flops_per_token(seq, causal=c) for c in (True, False))
    steps = max(0, job.last_step - job.step_number)
    bound = min_step_time(job)
    tokens = tokens_per_step(job)
    text = f"{si(causal)}FLOP per token, forward and backward ({si(full)}FLOP with full attention)"
    yield "work", text
    parts = run.train.batch // run.train.micro_batch
    sizes = job.loader.sizes
    step = job.step_number
    to_go = sizes.before(step + steps) - sizes.before(step)
    if run.train.ramp is not None:
        last, _ = sizes.stages[-1]
        now = sizes.size(step)
        yield "batch", f"{now} sequences, {run.train.batch} from step {last + 1:,} on"
    on_all = "" if job.world.size == 1 else f" on all {job.world.size} ranks"
    batch = f"{run.train.batch} sequences of {seq} = {tokens:,} tokens a step"
    left = f"{plural(steps, 'step')} to go, {count(to_go * seq)} tokens"
    yield "", f"{batch}, in {plural(parts, 'micro-batch', 'es')}; {left}"
    least = f"at least {step_time(bound)} a step and {clock(steps * bound)} in total"
    yield (
        "time",
        f"{least}, if every matrix product ran at the best measured rate{on_all}; a forecast "
        "follows after 3 steps",
    )
    memory = f"{size(state_bytes(job))} of weights, gradients and optimizer state"
    yield "memory", f"{memory}; peak memory is measured after 3 steps"


def _device(job: Trainer) -> str:
    """Return the device's name; for a CPU with the number of threads, and whether they spin."""
    if job.device.type == "cuda":
        return torch.cuda.get_device_name(job.device)
    threads = torch.get_num_threads()
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    text = f"CPU ({platform.machine()}), {plural(threads, 'thread')}"
    if threads == 1 or policy.lower() == "passive":
        return text
    return f"{text} that spin while idle; set OMP_WAIT_POLICY=passive before torch is loaded"


def _execution(job: Trainer) -> Iterator[Row]:
    dtype = job.model.precision_policy.dtype
    machine = job.utilisation.machine
    rate = f"{si(machine.flops_per_s)}FLOP/s ({machine.source})"
    if job.utilisation.peak is not None:
        rate += f" of {si(job.utilisation.peak)}FLOP/s published peak"
    rate += " per rank" if job.world.size > 1 else ""
    layout = job.run.layout.split.text or "of data-parallel ranks only"
    backend = "NCCL" if job.device.type == "cuda" else "gloo"
    ranks_text = f"{job.world.size}, layout {layout}, over {backend}"
    yield "ranks", "one" if job.world.size == 1 else ranks_text
    yield "device", f"{_device(job)}; {rate}"
    master = str(job.model.precision_policy.master_dtype).removeprefix("torch.")
    masters = "" if master == str(dtype).removeprefix("torch.") else f", {master} master weights"
    choice = f"{job.precision.why}; measured: {job.precision.rates_text}"
    yield "precision", f"products in {str(dtype).removeprefix('torch.')}{masters} ({choice})"
    if isinstance(quantise := job.run.train.quantise, Quantise):
        number = len(quantised_weight_names(job.run.decoder))
        wide = str(dtype).removeprefix("torch.")
        products = f"y, dx and dw in {quantise.kind}"
        if quantise.wgrad == "wide":
            products = f"y and dx in {quantise.kind}, dw in {wide}"
        if quantise.scaling == "delayed":
            products += ", with delayed scaling"
        yield "quantise", f"products of {number} weights: {products}"
        recipe = recipe_of(quantise)
        use = recipe.product_spec("y", False, dtype, job.device)
        products = PRODUCTS[: 2 + recipe.narrow_dw]
        for line in describe_backends(recipe.backend, use, products):
            yield "", line
    kernels = {}
    for i, mixture in job.model.moe_layers():
        kernel = mixture.experts.kernel(dtype, job.device)
        kernels.setdefault((kernel.name, kernel.reason), []).append(i)
    for (name, why), layers in kernels.items():
        where = "" if len(kernels) == 1 else f" in layers {layers}"
        yield "experts", f"{name}{where}: {why}"
    if job.device.type == "cuda":
        yield "kernels", why_no_triton("cuda") or "moefold's Triton kernels, except in fp64"
    yield "attention", "scaled_dot_product_attention within each document"
    for index, (kind, text) in enumerate(job.optimizer.describe().items()):
        yield "" if index else "optimizer", f"{kind}: {text}"
    extra = newton_schulz_flops(job.run.decoder, job.run.optim)
    if extra:
        step = tokens_per_step(job) * job.counts.flops_per_token(job.run.data.seq, causal=True)
        share = f"{100 * extra / step:.0f} % of the model's FLOP"
        yield "", f"Newton-Schulz: {si(extra)}FLOP a step, {share}, not counted in MFU"
    if job.device.type == "cuda" and job.run.layout.graphs != "none":
        with suppress(ValueError):  # the planner does not know the run
            buffer_bytes = max(graph_bytes(job.run, job.world.size))
            kind = job.run.layout.graphs
            yield "graphs", f"{kind}: {size(buffer_bytes)} planned for inputs and outputs"
    recompute = job.run.layout.recompute
    if recompute is not None:
        modules = ", ".join(getattr(recompute, "modules", ()))
        kind = getattr(recompute, "kind", type(recompute).__name__)
        yield "recompute", f"{kind} {modules}".strip()
    offload = job.run.layout.offload
    for destination, offload_part in ({} if offload is None else offload.destinations).items():
        where = f"{'in' if destination == 'pages' else 'on'} {destination}"
        yield where, f"{', '.join(offload_part.modules)} of {offload_part.share:.0%} of the layers"
        if spill := getattr(offload_part, "spill", 0):
            yield "on host", f"pages of {spill:.0%} of the layers, until backward"


def _balance(job: Trainer) -> str:
    """Describe each term: its coefficient, and what it adds to the loss under an even load."""
    coefficients_by_term: dict[str, list[float]] = {}
    rates: dict[float, int] = {}
    model = job.model
    if job.world.folding.sizes.pp > 1:  # a rank has only some layers
        model = DecoderModel(job.run.decoder, job.precision.precision, device="meta")
    for _, mixture in model.moe_layers():
        for name, coefficient in mixture.terms.items():
            coefficients_by_term.setdefault(name, []).append(coefficient)
        for term in mixture.record.balance:
            if isinstance(term, Bias):
                rates[term.rate] = rates.get(term.rate, 0) + 1
    texts = []
    for name, coefficients in coefficients_by_term.items():
        values = " and ".join(f"{c:g}" for c in dict.fromkeys(coefficients))
        total = math.fsum(coefficients)
        number = len(coefficients)
        texts.append(f"{name}: {values} in each of {number} layers, {total:g} in total")
    texts += _folder_unit(job, coefficients_by_term.get("aux_micro_batch", ()))
    texts += [f"selection bias: rate {rate:g} in {n} layers" for rate, n in rates.items()]
    if not texts:
        return "none" if any(model.moe_layers()) else "none (no experts)"
    return "; ".join(texts) + ". The reported LM loss excludes balancing terms"


def _rate(job: Trainer) -> Iterator[Row]:
    """Describe the learning rate of the next step, if any is to go."""
    if job.step_number < job.last_step:
        optim = job.run.optim
        progress = job.progress
        text = describe_rate(progress.rate, optim.schedule_lr, progress.updates, optim.lr)
        factor = rate_factor(progress.rate, optim.schedule_lr, progress.updates)
        others = [f"{label} {rate:.3g}" for label, rate in optim.group_rates(factor).items()]
        if progress.skipped:
            others.append(f"{progress.skipped:,} of {progress.step:,} steps were skipped")
        yield "rate", "; ".join([text, *others])


def _folder_unit(job: Trainer, coefficients: Sequence[float]) -> Iterator[str]:
    """Say what a folder's ``router_aux_loss_coef`` adds here, and in ``transformers``.

    There the statistics of all layers and choices are averaged first, with a term of top_k under an
    even load; here each layer has a term, which is 1 then.
    """
    of_folder = isinstance(job.run.model, Folder) and job.run.model.balance is None
    if not of_folder or not coefficients:
        return
    tops = [routing.top_k for routing in routings(job.run.decoder)]
    theirs = coefficients[0] * max(tops)
    equal = theirs / len(coefficients)
    yield (
        f"in transformers the folder's coefficient {coefficients[0]:g} adds {theirs:g} in total "
        f"(one mean over all layers, top_k under an even load); {equal:g} in model.balance adds "
        "as much here"
    )


def _data(job: Trainer) -> Iterator[Row]:
    prepared = job.loader.prepared
    last = max(job.last_step, job.step_number)
    steps = last - job.step_number
    begins, ends = (job.loader.epoch(step) for step in (job.step_number, last))
    for part in prepared.train:
        corpus = part.corpus
        contents = f"{corpus.n_documents:,} documents, {count(corpus.n_tokens)} tokens"
        times = ends[part.name] - begins[part.name]
        yield "data", f"{part.name}: {contents}, read {times:.2g} times in {plural(steps, 'step')}"
    for part in prepared.valid:
        documents = part.corpus.n_documents
        tokens = count(part.corpus.n_tokens)
        yield "held out", f"{part.name}: {documents:,} documents, {tokens} tokens"
    for name, reasons in prepared.skipped.items():
        for reason, skipped in reasons.items():
            first = ", ".join(skipped["first"][:2])
            number = plural(skipped["count"], skipped.get("unit", "document"))
            yield "skipped", f"{name}: {number}, {reason}: {first}"
    tokenizer = job.tokenizer
    kind = getattr(job.run.data.tokenizer, "kind", "")
    yield "tokenizer", f"{kind}, {tokenizer.size:,} tokens, embedding of {tokenizer.vocab:,} rows"
    if tokenizer.ends[1:]:
        yield "tokenizer", f"texts end with {' or '.join(tokenizer.ends)}"
    for note in tokenizer.notes:
        yield "tokenizer", note
