"""Published rows as cases, and which rows are left out: a rule that was written before scoring.

A row is left out when

1. it has no metric (TFLOP/s, MFU, tokens/s or step time), as those that only ran out of memory;
2. a dimension is missing: device, number, precision, sequence, batch, pp or ep (micro-batch 1,
   cp 1, vpp 1 and the stack's etp are the meaning of blanks), or the model's own dimensions;
3. ``published_runs.md`` section 5 states a conflict about its layout, device, format or time.

A row that only looks like a regression (a tenth slower than an earlier release of the same layout)
stays in and is marked.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planning import defaults
from planning.numbers import numbers

from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.model.config import Decoder, MultiToken
from moefold.parallel.config import Layout
from moefold.planner.case import Case, Overlaps, Software
from moefold.planner.hardware import parse_cluster
from moefold.planner.layouts import OptimizerOnHost, make_dispatch, make_layout
from moefold.planner.published import UndescribedModel, published_model
from moefold.planner.time import model_flops
from moefold.schedule.config import DualPipeV, Interleaved, Merged, OneFOneB, Schedule
from moefold.spec.decoder import with_multi_token

FILE = Path(__file__).parents[1] / "data" / "published_runs.json"
CONFLICTS = {
    "mcore26-dsv3-h100-fp8blk": "5.1: PP4 or PP8",
    "mcore26-qwen3-235b-gb300-mxfp8": "5.1: EP64 VPP6 or EP32 VPP1",
    "mcore26-qwen3-235b-gb200-bf16": "5.1: PP4 EP32 VPP12 or PP8 EP8 VPP1",
    "mpf-t3-llama38x70b-": "5.2: number of GPUs",
    "mpf-t5-qwen2": "5.2: block printed twice",
    "mb-25.09-dsv3-GB200-256g-FP832x32w": "5.3: EP64 impossible with PP8",
    "skill-qwen3-235b-b200-128": "5.3",
    "skill-dsv3-b200-256-bf16": "5.3: EDP2 impossible",
    "card-nemotron-3-super-120b-a12b-perf-GB200-BF16": "5.4: sequence length",
    "card-nemotron-3.5-lightning": "5.5: BF16 or MXFP8",
    "mb-26.08-lightning-GB200": "5.5: BF16 or MXFP8",
    "skill-dsv3-long-": "5.6: CP or TP",
    "mb-26.06.01-gptoss": "5.8: known regression, not to be used",
}
"""Where an id begins, and the conflict that section 5 states about it."""
REMEMBERED = "vocabulary of Nemotron-3-Nano"
"""What may be assumed of a model: the larger Nemotron-3 models' own vocabulary is not printed."""
METRICS = (
    "tflops_per_gpu",
    "mfu_percent",
    "tokens_per_s_per_gpu",
    "step_time_s",
    "tokens_per_s_per_gpu_derived",
)
NEEDED = ("gpu", "num_gpus", "seq_len", "gbs", "pp", "ep")
PEAKS = {"H100": 989.5e12, "H800": 989e12, "GB200": 2450e12, "B200": 2250e12, "GB300": 2500e12}
"""BF16 peaks that the sources divide by for MFU."""
MFU_ON_FP8_PEAK = {"dgxc-llama4mav-h100-512-fp8": 1979e12}


@dataclass(frozen=True)
class Row:
    """A row with its case, or with why it has none."""

    raw: dict[str, Any]
    planned: Case | None
    measured: float | None
    """Seconds of a step: published, or derived from what was."""
    gflop_per_token: float | None
    """As the source counts."""
    left_out: str = ""
    marks: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The row's name."""
        return self.raw["id"]

    @property
    def case(self) -> Case:
        """The case of a row that is scored."""
        assert self.planned is not None
        return self.planned

    @property
    def seconds(self) -> float:
        """The seconds of a row that is scored."""
        assert self.measured is not None
        return self.measured

    @property
    def stack(self) -> str:
        """Stack and release, without its last digits."""
        where = defaults.origin(self.raw)
        return f"{where.stack} {where.release[:5]}".strip()

    @property
    def host(self) -> str:
        """Kind of the hosts: ``x86`` or ``grace``."""
        return self.case.cluster.device.host

    def rate(self, seconds: float) -> float:
        """Return TFLOP/s per GPU, as the source counts, of a step that takes so long."""
        assert self.gflop_per_token is not None
        tokens = self.case.batch * self.case.seq / self.case.world
        return tokens * self.gflop_per_token / seconds / 1e3


def read(file: Path = FILE) -> list[Row]:
    """Return every row of a file of the published form."""
    raws = [{**row} for row in json.loads(Path(file).read_text("utf-8"))]
    rows = [_row(raw) for raw in raws]
    return [_marked(row, rows) for row in rows]


def _row(raw: dict[str, Any]) -> Row:
    """Return one row, with the reason if it is left out."""
    full = filled(raw)
    for start, why in CONFLICTS.items():
        if raw["id"].startswith(start):
            return Row(raw, _case_or_none(full), None, None, f"conflict {why}")
    if raw.get("status") == "OOM" or not any(raw.get(name) for name in METRICS):
        return Row(raw, _case_or_none(full), None, None, "no metric")
    missing = [name for name in NEEDED if not full.get(name)]
    if missing:
        return Row(raw, None, None, None, f"incomplete: {', '.join(missing)}")
    try:
        case = case_of(full)
    except UndescribedModel as error:
        return Row(raw, None, None, None, f"incomplete: {error}")
    except ValueError as error:
        return Row(raw, None, None, None, f"conflict: {str(error).splitlines()[0]}")
    counted = _gflop_per_token(raw, case)
    return Row(raw, case, _seconds(raw, case, counted), counted)


def decoder(name: str) -> Decoder:
    """Return a published model whose dimensions sources print in full, but for a vocabulary.

    Raises:
        Undescribed: where another dimension is missing.
    """
    found = published_model(name)
    if found.assumed not in ("", REMEMBERED):
        raise UndescribedModel(f"{name}: dimensions are not complete")
    return found.decoder


def _case_or_none(raw: dict[str, Any]) -> Case | None:
    """Return the case of a row that is not scored, for its memory, where there is one."""
    try:
        return None if any(not raw.get(name) for name in NEEDED) else case_of(raw)
    except ValueError:
        return None


def filled(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the stated meaning of its blanks."""
    where = defaults.origin(raw)
    filled = {name: value for name, value in raw.items() if value is not None}
    if where.stack in ("automodel", "deepseek"):
        filled = {"tp": 1, "ep": 1} | filled
    if defaults.sharded(raw, where) == 3 or where.release == "mpf":
        filled = {"pp": 1, "ep": 1} | filled
    return {"tp": 1, "cp": 1, "vpp": 1, "mbs": 1} | filled


def case_of(row: dict[str, Any]) -> Case:
    """Return a filled row as a case.

    Raises:
        ValueError: where the model is not described or the layout does not exist.
    """
    where = defaults.origin(row)
    model = decoder(row["model"])
    overlap = defaults.expert_overlap(row, where)
    pp, vpp = row["pp"], row["vpp"] if row["pp"] > 1 else 1
    schedule = _schedule(row, overlap, vpp)
    if isinstance(schedule, DualPipeV):
        vpp = 2
    sizes = Sizes(
        tp=row["tp"], cp=row["cp"], pp=pp, vpp=vpp, ep=row["ep"],
        etp=defaults.expert_tensor(row, where),
    )  # fmt: skip
    stages = _stages(row, pp, vpp, len(model.blocks))
    further = [MultiToken()] * sum(stage.count("m") for stage in stages.letters)
    return Case(
        decoder=with_multi_token(model, further),
        seq=row["seq_len"],
        batch=row["gbs"],
        micro_batch=row["mbs"],
        cluster=parse_cluster(f"{row['gpu']}x{row['num_gpus']}"),
        layout=_layout(row, where, sizes, stages, schedule),
        load=defaults.load(row),
        number_formats=numbers(row, where),
        software=Software(
            stack=where.stack,
            release=where.release,
            cuda_graphs=defaults.graphs(row, where),
            overlaps=Overlaps(
                tp="tp_comm" in (row.get("overlap") or "")
                or "tp-comm" in (row.get("overlap") or ""),
                ep=overlap,
                gradients=True,
                parameters=True,
            ),
            host_speed=defaults.host_speed(row),
            chunks_head=defaults.chunks_head(row),
            fuses_loss=defaults.fuses_loss(where),
        ),
    )


def _layout(
    row: dict[str, Any],
    where: defaults.Origin,
    sizes: Sizes,
    stages: Stages,
    schedule: Schedule,
) -> Layout:
    """Return a row's layout, with what is sharded, recomputed and moved to the host."""
    share = re.search(r"optimizer CPU offload fraction (\d+)", row.get("notes") or "")
    to_host = row.get("optimizer_offload", int(share[1]) / 100 if share else 0.0)
    modules = ["experts"] if "offload fused_group" in (row.get("overlap") or "") else []
    kind = "local" if row["ep"] == 1 else defaults.dispatcher(row, where)
    return make_layout(
        sizes,
        schedule=schedule,
        stages=stages,
        dispatch=make_dispatch(kind),
        zero=defaults.sharded(row, where),
        recompute=defaults.recompute(row, where),
        offload=frozenset(row.get("offload", modules)),
        state=OptimizerOnHost(share=to_host),
    )


def _schedule(row: dict[str, Any], overlap: bool, vpp: int) -> Schedule:
    """Return the schedule of a row."""
    if "DualPipe" in (row.get("overlap") or "") or row["id"].startswith("dsv3-prod"):
        return DualPipeV()
    if overlap:
        return Merged()
    return Interleaved() if vpp > 1 else OneFOneB()


def _stages(row: dict[str, Any], pp: int, vpp: int, layers: int) -> Stages:
    """Return the stages that a row prints, where they are whole, or balanced ones."""
    printed = re.search(
        r"layout (E\S+)", f"{row.get('optimizer_notes') or ''} {row.get('notes') or ''}"
    )
    if printed:
        try:
            stages = Stages.parse(printed[1].rstrip(";,"))
        except ValueError:
            stages = None
        if stages and len(stages.letters) == pp * vpp and stages.layers == layers:
            return stages
    usual = defaults.stages(row, pp * vpp)
    if usual:
        return Stages.parse(usual)
    return Stages.balanced(pp, vpp, layers, defaults.multi_token(row))


def _gflop_per_token(raw: dict[str, Any], case: Case) -> float:
    """Return what the source counts per token: as it implies, else by the model's own count."""
    if raw.get("gflop_per_token_implied"):
        return raw["gflop_per_token_implied"]
    return model_flops(case) / (case.batch * case.seq) / 1e9


def _seconds(raw: dict[str, Any], case: Case, counted: float) -> float:
    """Return the time of a step by the most direct figure that a row has."""
    tokens = case.batch * case.seq / case.world
    if raw.get("step_time_s"):
        return raw["step_time_s"]
    rate = raw.get("tokens_per_s_per_gpu") or raw.get("tokens_per_s_per_gpu_derived")
    if rate:
        return tokens / rate
    if raw.get("tflops_per_gpu"):
        return tokens * counted / raw["tflops_per_gpu"] / 1e3
    peak = MFU_ON_FP8_PEAK.get(raw["id"], PEAKS.get(raw["gpu"], case.cluster.device.peak("bf16")))
    return tokens * counted * 1e9 / (raw["mfu_percent"] / 100 * peak)


def shape(raw: dict[str, Any]) -> tuple[Any, ...]:
    """Return what rows of one model, device and layout share."""
    keys = ("model", "gpu", "num_gpus", "seq_len", "tp", "cp", "pp", "vpp", "ep", "mbs")
    return tuple(raw.get(key) or (1 if key in ("vpp", "cp") else None) for key in keys)


def _marked(row: Row, rows: list[Row]) -> Row:
    """Mark what looks like a regression: an earlier release of the layout was a tenth faster."""
    rate, where = row.raw.get("tflops_per_gpu"), defaults.origin(row.raw)
    if row.left_out or not rate or not where.release[:2].isdigit():
        return row
    for other in rows:
        earlier = defaults.origin(other.raw).release
        same = shape(other.raw) == shape(row.raw) and other.raw["id"][:3] == row.id[:3]
        faster = (other.raw.get("tflops_per_gpu") or 0) > 1.1 * rate
        if same and faster and not other.left_out and earlier < where.release:
            return Row(row.raw, row.planned, row.measured, row.gflop_per_token, "", ("regression",))
    return row
