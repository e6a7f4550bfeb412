"""Forward and backward of one micro-batch on one model chunk, as task lists.

T rows on this rank, D hidden. Without pairs in the table the chunk is one part. With pairs each
segment of a block is a part, so that exchanges of one micro-batch overlap with compute of another.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from moefold.comm.world import World
from moefold.layers.flow import Exchange, Flow, Segment
from moefold.layers.saved_tensors import SavedTensors, unpack
from moefold.model.decoder import DecoderModel
from moefold.parallel.apply import Chunk
from moefold.parallel.pipeline.lanes import FillTask, LaneTask, State
from moefold.parallel.pipeline.partial import GraphedPart, GraphedPass
from moefold.parallel.pipeline.subgraph import Subgraph

Loss = Callable[[Tensor, Flow, int], tuple[Tensor, Tensor]]
"""``loss(x_TD, flow, later)``: this rank's part of the summed loss on labels ``later`` tokens
ahead, and the scaled gradient of x_TD."""
LEAF = tree_flatten(0)[1]
"""The pytree structure of a block's input: one tensor."""


class ChunkPass:
    """One micro-batch's forward over one chunk, and the state for its backward.

    Args:
        model: the parts of the model on this rank.
        chunk: the layers to run.
        flow: the micro-batch's flow, with this chunk's gradient sink.
        fraction: weight of the router terms: the micro-batch's fraction of the step's valid rows.
        loss: computes the loss at the end of the last stage.
        secondary: groups for exchanges that overlap with another pass; each segment is then a part.
        graphs: CUDA graphs of segments, or None; without both the chunk is a single part.
    """

    def __init__(
        self,
        model: DecoderModel,
        chunk: Chunk,
        flow: Flow,
        fraction: float | Tensor,
        loss: Loss,
        secondary: World | None,
        graphs: GraphedPass | None = None,
    ) -> None:
        self._model = model
        self._chunk = chunk
        self._flow = flow
        self._fraction = fraction
        self._loss = loss
        self._graphs = graphs
        self._second_flow = None if secondary is None else replace(flow, world=secondary)
        self._backward_tasks: list[list[LaneTask]] = []
        """Backward tasks of each section of the forward so far."""
        self.summed_loss: Tensor | None = None
        """This rank's part of the micro-batch's summed loss, if the chunk has the head."""
        self.terms: list[tuple[int, Tensor]] = []
        """(layer, router terms [N] without gradient)."""
        self.seeds: list[Tensor] = []
        """Gradients of the step's loss with respect to router terms, elementwise."""

    def forward(self) -> list[LaneTask]:
        """Return the tasks from the chunk's input rows (none if it embeds) to its output."""
        chunk = self._chunk
        if self._second_flow is None and self._graphs is None:
            losses = [LaneTask(self._compute_losses)] if chunk.has_head else []
            return [self._single_task(chunk.has_embedding, chunk.layers), *losses]
        tasks: list[LaneTask] = []
        if chunk.has_embedding:
            start = Subgraph(lambda: (self._model.start(self._flow),))
            self._backward_tasks.append([LaneTask(start.backward)])
            tasks.append(LaneTask(start.forward))
        elif self._graphs is not None:
            self._backward_tasks.append([LaneTask(_copy_state)])
        for index, number in enumerate(chunk.layers):
            tasks += self._block(number, (index, len(chunk.layers)))
        if chunk.has_norm or chunk.has_head:
            tasks.append(self._single_task(False, ()))
        if chunk.has_head:
            tasks.append(LaneTask(self._compute_losses))
        elif self._graphs is not None:
            tasks.append(LaneTask(_copy_state))
        return tasks if self._second_flow else [task._replace(is_exchange=False) for task in tasks]

    def backward(self, drain: Callable[[], Any] | None = None) -> list[LaneTask | FillTask]:
        """Return the tasks from the output's gradient to the input's; can be called once.

        ``drain`` computes deferred weight gradients: concurrently with exchanges, and at the end.
        """
        sections = self._backward_tasks
        self._backward_tasks = []
        back = [task for section in reversed(sections) for task in section]
        if self._second_flow is None:
            back = [task._replace(is_exchange=False) for task in back]
        if drain is None:
            return list(back)
        tasks: list[LaneTask | FillTask] = []
        for task in back:
            tasks += [task, FillTask(drain)] if task.is_exchange else [task]
        return [*tasks, FillTask(drain)]

    def _single_task(self, embeds: bool, layers: Sequence[str]) -> LaneTask:
        """Return one task for the chunk's embedding, ``layers``, norm and multi-token layers."""
        model = self._model
        chunk = self._chunk
        flow = self._flow
        term_layers: list[int] = []

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            if chunk.receives > 1:  # all has been run but the head
                return inputs[0].chunk(chunk.receives) if chunk.has_head else inputs
            x_TD = model.start(flow) if embeds else inputs[0]
            x_TD, terms = model.run(flow, x_TD, layers)
            normed_TD = model.finish(flow, x_TD) if chunk.has_norm else x_TD
            shifted = list[Tensor]()
            more = dict[int, Tensor]()
            if chunk.multi_token:
                shifted, more = model.run_multi_token(flow, x_TD, normed_TD)
            term_layers.extend([*terms, *more])
            rows = (normed_TD, *shifted)
            if shifted and not chunk.has_head:  # one message
                rows = (torch.cat(rows),)
            return *rows, *terms.values(), *more.values()

        subgraph = Subgraph(run)
        self._backward_tasks.append([LaneTask(subgraph.backward)])

        def forward(*inputs: Any) -> State:
            outputs = subgraph.forward(*inputs)
            num_rows = len(outputs) - len(term_layers)
            rows = outputs[:num_rows]
            terms = outputs[num_rows:]
            subgraph.seeds = self._seeds(dict(zip(term_layers, terms, strict=True)))
            return rows

        return LaneTask(forward)

    def _compute_losses(self, *rows: Tensor) -> State:
        """Compute losses and gradients together, so that logits are never saved or recomputed."""
        with self._flow.unshard.unsharded(self._model.head_unit):
            pairs = [
                self._loss(x_TD.detach(), self._flow.shifted(later), later)
                for later, x_TD in enumerate(rows)
            ]
        losses, gradients = zip(*pairs, strict=True)
        self.summed_loss = losses[0]
        if len(losses) > 1:
            self.summed_loss = torch.cat([loss.view(-1) for loss in losses])
        return gradients

    def _block(self, number: str, position: tuple[int, int]) -> list[LaneTask]:
        """Return the tasks of one layer; the last task also records its router terms."""
        segments = self._model.layers[number].segments()  # type: ignore[operator]
        parts = self._parts(segments, position)
        hooks = self._flow.unshard
        unit = f"layers.{number}"
        forward = [LaneTask(part.forward, part.is_exchange) for part in parts]
        backward = [LaneTask(part.backward, part.is_exchange) for part in reversed(parts)]
        before = _hook_task(hooks.pre_backward, unit)
        after = _hook_task(hooks.post_backward, unit)
        # Without a backward it saves nothing, whether recomputed or not.
        has_backward = position[0] + self._chunk.has_embedding >= self._chunk.forward_only
        if has_backward and self._flow.saved_tensors.block:
            forward, backward = _recomputed_tasks(parts, self._flow.saved_tensors, position)
        if has_backward:
            self._backward_tasks.append([before, *backward, after])

        def close(x_TD: Tensor, terms_N: Tensor) -> State:
            hooks.post_forward(unit)
            parts[-1].seeds = self._seeds({int(number): terms_N})
            return (x_TD,)

        return [_hook_task(hooks.pre_forward, unit), *forward, LaneTask(close)]

    def _parts(
        self, segments: Sequence[Segment], position: tuple[int, int]
    ) -> list[Subgraph | GraphedPart]:
        """Return a block's parts; records of tensors are flattened between them."""
        tree_specs: list[TreeSpec] = [LEAF] * (len(segments) + 1)

        def run(start: int, end: int, flow: Flow, *values: Any) -> tuple[Any, ...]:
            state = tree_unflatten(values, tree_specs[start])
            with flow.saved_tensors.layer_hooks(*position):
                for segment in segments[start:end]:
                    state = segment(state, flow)
            flat, tree_specs[end] = tree_flatten(state)
            return tuple(flat)

        exchanges = [isinstance(segment, Exchange) for segment in segments]
        graphs = self._graphs
        graphed = [
            graphs is not None and graphs.is_graphed(index, exchanges)
            for index in range(len(segments))
        ]
        # Consecutive segments in graphs are one part, whose intermediates need no static memory.
        starts = [i for i in range(len(graphed)) if not (i and graphed[i - 1] and graphed[i])]
        parts: list[Subgraph | GraphedPart] = []
        for start, end in pairwise([*starts, len(graphed)]):
            is_exchange = exchanges[start] and not graphed[start]
            flow = self._second_flow if is_exchange and self._second_flow else self._flow
            part = Subgraph(partial(run, start, end, flow), is_exchange)
            if graphs is not None and graphed[start]:
                parts.append(GraphedPart(graphs, part, (position, end), flow.sink, tree_specs))
            else:
                parts.append(part)
        return parts

    def _seeds(self, terms: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
        """Record router terms [N] by layer; return the gradient of the step's loss for each."""
        router_terms = {layer: values.detach() for layer, values in terms.items() if values.numel()}
        if self._graphs is not None:  # a replay overwrites them
            router_terms = {layer: values.clone() for layer, values in router_terms.items()}
        self.terms += router_terms.items()
        _, weighted = self._model.sum_router_terms(terms)
        if weighted is None or not weighted.requires_grad:
            return (None,) * len(terms)
        leaves = [values for values in terms.values() if values.requires_grad]
        scale = torch.ones_like(weighted) * self._fraction
        seeds = torch.autograd.grad(weighted, leaves, scale, allow_unused=True)
        self.seeds += [seed for seed in seeds if seed is not None]
        remaining = iter(seeds)
        return tuple(next(remaining) if t.requires_grad else None for t in terms.values())


def _hook_task(hook: Callable[[str], None], unit: str) -> LaneTask:
    """Return a task that calls an unshard hook for a unit and passes its state through."""

    def run(*state: Any) -> State:
        hook(unit)
        return state

    return LaneTask(run)


def _copy_state(*state: Any) -> State:
    """Copy a chunk's inputs or outputs, whose memory graph replays overwrite."""
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in state)


def _recomputed_tasks(
    parts: Sequence[Subgraph | GraphedPart], saved: SavedTensors, position: tuple[int, int]
) -> tuple[list[LaneTask], list[LaneTask]]:
    """Return the forward and backward tasks of a fully recomputed block: only its input is saved.

    Its parts run again in backward, except an exchange at the end, which runs once: for its
    backward it saves the destinations of rows, but no rows.
    """
    run_once = [part for part in parts[1:][-1:] if part.is_exchange]
    recomputed = parts[: len(parts) - len(run_once)]
    saved_inputs: list[tuple[Any, bool]] = []
    output_gradients: list[State] = []

    def save_input(x_TD: Tensor) -> State:
        with saved.layer_hooks(*position):
            saved_inputs.append((saved.pack(x_TD), x_TD.requires_grad))
        return (x_TD,)

    def begin_recompute(*gradients: Any) -> State:
        output_gradients.append(gradients)
        x_TD, live = saved_inputs.pop()
        saved.recomputing = True
        return (unpack(x_TD).detach().requires_grad_(live),)

    def end_recompute(*_: Any) -> State:
        saved.recomputing = False
        return output_gradients.pop()

    forward = [
        LaneTask(save_input),
        *(LaneTask(part.forward_no_grad, part.is_exchange) for part in recomputed),
    ]
    forward += [LaneTask(part.forward, True) for part in run_once]
    return forward, [
        *(LaneTask(part.backward, True) for part in run_once),
        LaneTask(begin_recompute),
        *(LaneTask(part.forward, part.is_exchange) for part in recomputed),
        LaneTask(end_recompute),
        *(LaneTask(part.backward, part.is_exchange) for part in reversed(recomputed)),
    ]
