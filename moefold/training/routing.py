"""How the router of each layer fared in the last step, over all ranks."""

from itertools import chain
from operator import itemgetter
from typing import Any

from moefold.comm.collectives import gather_objects
from moefold.parallel.apply import Placed


def routing(placed: Placed) -> list[dict[str, Any]]:
    """Return the figures of each mixture's routing in the last step, in the order of layers."""
    layers = []
    for i, mixture in placed.model.mixtures():
        figures = mixture.balance.health(mixture.router)
        said = {"layer": i, "top_k": mixture.record.router.top_k}
        layers.append(said | {name: held.tolist() for name, held in figures.items()})
    world = placed.world
    first = world.group("stage").index == 0  # Others of a stage have the same figures.
    everywhere = gather_objects(layers if first else [], world.on_host)
    return sorted(chain.from_iterable(everywhere), key=itemgetter("layer"))
