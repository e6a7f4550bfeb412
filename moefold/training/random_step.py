"""A run's model with drawn weights, and random tokens, for steps that only measure."""

from collections.abc import Sequence
from typing import NamedTuple

from moefold.comm.world import World
from moefold.data.batch import MicroBatch, random_batches
from moefold.layers.config import Precision
from moefold.model.init import initialise
from moefold.optim.base import Optimizer
from moefold.parallel.apply import build_parts
from moefold.parallel.data.sharding import ShardedState
from moefold.run import Run


class RandomStep(NamedTuple):
    """What a rank needs for steps that only measure."""

    state: ShardedState
    optimizer: Optimizer
    batches: Sequence[MicroBatch]
    """Micro-batches of random tokens on the rank's device, the same for each step."""


def random_step(
    world: World, run: Run, precision: Precision, micro_batches: int, seed: int
) -> RandomStep:
    """Return a rank's model with initial weights, its optimizer and a step's random tokens.

    Args:
        world: the rank.
        run: states model, layout, optimizer and the shape of a micro-batch.
        precision: format in which the model computes.
        micro_batches: number of micro-batches of a step on this rank.
        seed: seed of the tokens.
    """
    parts = build_parts(run.decoder, precision, run.layout, world)
    initialise(parts.model, run.decoder, run.seed, parts.shards)
    state = ShardedState(parts)
    shape = run.train.micro_batch, run.data.seq
    batches = random_batches(run.decoder.vocab, shape, micro_batches, seed)
    on_device = [batch.to(world.device) for batch in batches]
    return RandomStep(state, state.optimizer(run.optim), on_device)
