"""One forward pass through all stages, for a loss without gradients."""

import torch
from torch import Tensor

from moefold.comm.collectives import receive, send
from moefold.layers.flow import Flow
from moefold.layers.loss import summed_loss
from moefold.parallel.apply import Placed


@torch.no_grad()
def score(placed: Placed, flow: Flow, loss_chunk: int) -> Tensor:
    """Return this rank's share of a micro-batch's summed cross-entropy, fp64.

    Args:
        placed: this rank's parts.
        flow: the pass; outside training.
        loss_chunk: rows whose logits exist at once.
    """
    model, ranks = placed.model, placed.world.group("pp")
    table, rank = placed.table(placed.enough), placed.world.attention.pp
    total = torch.zeros((), dtype=torch.float64, device=placed.world.device)
    x_TD: Tensor | None = None
    for stage in range(table.stages):
        source, home = table.home(max(stage - 1, 0)), table.home(stage)
        if source != home and rank == source:
            assert x_TD is not None
            send(x_TD, ranks.ranks[home], ranks).wait()
        if rank != home:
            continue
        if source != home:
            shape = (flow.rows.rows, model.record.hidden)
            x_TD = torch.empty(shape, dtype=model.recipe.dtype, device=total.device)
            receive(x_TD, ranks.ranks[source], ranks).wait()
        chunk = placed.chunks[[table.stage(rank, c) for c in range(table.chunks)].index(stage)]
        x_TD = model.start(flow) if chunk.embeds else x_TD
        assert x_TD is not None
        x_TD, _ = model.run(flow, x_TD, chunk.layers)
        if chunk.scores:
            x_TD = model.finish(flow, x_TD)
            total += summed_loss(x_TD, model.head_operand(), flow, chunk=loss_chunk)
    return total
