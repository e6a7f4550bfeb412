"""Recording of routers' choices to disk, and their replay in another run.

A choice is identified by step, layer and the token's number in the step, which no layout changes:
any layout can replay what another one recorded. Each rank writes one file per step,
``STEP/RANK-of-RANKS.safetensors``, for its valid rows: ``token`` and ``id`` (numbers and ids of
tokens), and ``layers.N`` [tokens, places] for each of its layers: the experts, best first, or
``-1 - expert`` where capacity dropped it. A repeated step replaces its files.

T token rows, K places for experts in a row, N tokens of this rank in a step, M of a
file, L in both.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from moefold.checkpoint.folder import step_name
from moefold.data.batch import MicroBatch
from moefold.files import make_folder
from moefold.layers.flow import Flow
from moefold.layers.saved_tensors import RoutingDecisions
from moefold.moe.router import Decision
from moefold.parallel.apply import ModelParts
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline import graphs
from moefold.parallel.pipeline.executor import Factors, ScaledLoss, StepExecutor, StepResult
from moefold.training.config import Routing
from moefold.training.routing_trace import RoutingError, open_recording, step_files

FILE_PATTERN = "{}-of-{}.safetensors"
ABSENT = -(1 << 31)
"""Marks a place for which no choice was read."""


def _valid_tokens(flows: Sequence[Flow]) -> tuple[Tensor, Tensor]:
    """Return numbers and ids (int64) of the valid tokens of micro-batches, on the host."""
    rows = [flow.rows for flow in flows]
    parts = zip(*((r.token_T[: r.n_valid], r.ids_T[: r.n_valid]) for r in rows), strict=True)
    numbers, ids = (torch.cat(part).cpu() for part in parts)
    return numbers, ids


class ChoiceWriter:
    """Writes the choices of this rank's routers, step by step."""

    def __init__(self, folder: Path, parts: ModelParts) -> None:
        self._folder = folder
        self._parts = parts
        self._chosen = dict[str, dict[int, Tensor]]()
        self._tokens: tuple[Tensor, ...] = ()

    def begin(self, flows: Sequence[Flow]) -> list[Flow]:
        """Return the passes of a step, which report their decisions to this writer."""
        self._chosen = {}
        self._tokens = _valid_tokens(flows)
        records = [partial(self._record, number, flow.rows) for number, flow in enumerate(flows)]
        decisions = [RoutingDecisions(on_new=record) for record in records]
        return [replace(f, decisions=d) for f, d in zip(flows, decisions, strict=True)]

    def _record(self, number: int, rows: MicroBatch, key: str, decision: Any) -> None:
        if not isinstance(decision, Decision):
            return
        chosen_TK = decision.experts_TK
        kept_TK = decision.kept_TK
        if kept_TK is not None:
            chosen_TK = torch.where(kept_TK, chosen_TK, -1 - chosen_TK)
        narrow_NK = chosen_TK[: rows.n_valid].to(torch.int32)
        self._chosen.setdefault(key, {})[number] = narrow_NK.to("cpu", non_blocking=True)

    def end(self) -> None:
        """Write the step's file."""
        if self._parts.world.device.type == "cuda":
            torch.cuda.synchronize(self._parts.world.device)
        chosen = {
            key: torch.cat([parts[number] for number in sorted(parts)])
            for key, parts in self._chosen.items()
        }
        step = self._parts.model.precision_policy.step
        write_choices(self._folder, step, self._parts, self._tokens, chosen)


def write_choices(
    folder: Path,
    step: int,
    parts: ModelParts,
    tokens: Sequence[Tensor],
    chosen: Mapping[str, Tensor],
) -> None:
    """Write this rank's file of a step; files that other layouts left there are removed.

    Args:
        folder: folder of the recording.
        step: number of the step, from 0.
        parts: the model.
        tokens: numbers and ids [N] of this rank's tokens.
        chosen: experts [N, K] by layer.
    """
    world = parts.world
    step_folder = folder / step_name(step)
    make_folder(step_folder)
    for path in step_folder.glob(FILE_PATTERN.format("*", "*")):
        if not path.match(FILE_PATTERN.format("*", world.size)):
            path.unlink(missing_ok=True)  # of another layout, before the run was resumed
    file_tensors = {**dict(zip(("token", "id"), tokens, strict=True)), **chosen}
    choices = {f"layers.{n}": moe.record.router.choices for n, moe in parts.model.moe_layers()}
    path = step_folder / FILE_PATTERN.format(world.rank, world.size)
    save_file(file_tensors, path.with_suffix(".part"), {"choices": json.dumps(choices)})
    path.with_suffix(".part").replace(path)


class ChoiceReader:
    """Reads the choices of a recorded run in any layout, step by step."""

    def __init__(self, folder: Path, parts: ModelParts) -> None:
        self._folder = folder
        self._policy = parts.model.precision_policy
        self._layers = {f"layers.{n}": moe.record for n, moe in parts.model.moe_layers()}
        self._chosen = dict[str, Tensor]()

    def begin(self, flows: Sequence[Flow]) -> list[Flow]:
        """Return the passes of a step, with the recorded decisions.

        Raises:
            RoutingError: if decisions are missing, or are of other tokens or layers.
        """
        folder = self._folder / step_name(self._policy.step)
        (token_N, id_N) = _valid_tokens(flows)
        places = {key: record.router.places for key, record in self._layers.items()}
        absent_N1 = torch.full((len(token_N), 1), ABSENT, dtype=torch.int32)
        self._chosen = {key: absent_N1.repeat(1, number) for key, number in places.items()}
        for path in step_files(folder) if len(token_N) else ():
            self._read(path, token_N, id_N)
        for key, chosen_NK in self._chosen.items():
            if (missing := (chosen_NK[:, 0] == ABSENT).nonzero()).numel():
                raise RoutingError(
                    f"{folder}: no choice of {key} for token {token_N[missing[0, 0]]} of the step; "
                    "replay a recording of the same data, train.batch and layers"
                )
        start = 0
        replayed = list[Flow]()
        for flow in flows:
            token_range = slice(start, start := start + flow.rows.n_valid)
            read = partial(self._decision, flow.rows, token_range)
            replayed.append(replace(flow, decisions=RoutingDecisions(read=read)))
        return replayed

    def _read(self, path: Path, token_N: Tensor, id_N: Tensor) -> None:
        """Read from a file the choices for this rank's tokens."""
        with open_recording(path, "pt") as file:
            choices = file.experts
            token_M = file.token_M
            id_M = file.id_M
            sorted_N, order_N = token_N.sort()
            at_M = torch.searchsorted(sorted_N, token_M).clamp(max=len(sorted_N) - 1)
            local_M = sorted_N[at_M] == token_M
            row_L = order_N[at_M[local_M]]
            mismatched = (id_M[local_M] != id_N[row_L]).nonzero()
            if mismatched.numel():
                first = mismatched[0, 0]
                token = token_M[local_M][first]
                stored_id = id_M[local_M][first]
                raise RoutingError(
                    f"{path}: token {token} of the step has id {stored_id}, but "
                    f"{id_N[row_L][first]} in this run; replay a recording of the same data in the "
                    "same order"
                )
            for key in sorted(self._chosen.keys() & choices.keys()):
                chosen_MK = file.chosen(key)
                chosen_NK = self._chosen[key]
                expected = chosen_NK.shape[1], self._layers[key].router.choices
                if (chosen_MK.shape[1], choices[key]) != expected:
                    raise RoutingError(
                        f"{path}: {key} chose {chosen_MK.shape[1]} of {choices[key]} experts, but "
                        f"chooses {expected[0]} of {expected[1]} in this run"
                    )
                chosen_NK[row_L] = chosen_MK[local_M].to(chosen_NK.dtype)

    def _decision(self, rows: MicroBatch, token_range: slice, key: str) -> Decision:
        """Return the recorded decision of a layer for one micro-batch."""
        chosen_NK = self._chosen[key][token_range].to(torch.int64)
        record = self._layers[key]
        kept_NK = chosen_NK >= 0
        experts_NK = torch.where(kept_NK, chosen_NK, -1 - chosen_NK)
        padding = (0, 0, 0, rows.rows - rows.n_valid)
        device = rows.ids_T.device
        experts_TK = pad(experts_NK, padding, value=record.router.choices).to(device)
        return Decision(experts_TK, pad(kept_NK, padding).to(device) if record.capacity else None)

    def end(self) -> None:
        """Free the step's choices."""
        self._chosen = {}


def step_executor(state: ShardedState, record: Routing | None) -> StepExecutor:
    """Return the executor of steps for ``layout.graphs`` and ``train.routing``."""
    executor = graphs.build_executor(state)
    if record is None:
        return executor
    kind = ChoiceWriter if record.record else ChoiceReader
    recorder = kind(Path(record.record or record.replay or ""), state.parts)

    def run(
        parts: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> StepResult:
        result = executor(parts, recorder.begin(flows), factors, loss)
        recorder.end()
        return result

    return run
