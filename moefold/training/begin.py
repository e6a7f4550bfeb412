"""What a model begins with: drawn values, or the weights of a Hugging Face folder."""

from functools import partial

from moefold.convert.importer import import_folder
from moefold.model.config import Decoder
from moefold.model.families.folder import Folder
from moefold.model.init import start_value
from moefold.parallel.data.sharding import Data
from moefold.run import Run
from moefold.training.stored import demand_names


def start_values(run: Run, decoder: Decoder, data: Data, replaced: bool) -> tuple[str, ...]:
    """Fill a run's weights before step one; return what of its folder is left out, a line each.

    ``replaced``: others are put in their place at once, so that no folder is read.
    """
    source = run.model
    if replaced or not isinstance(source, Folder):
        data.fill(partial(start_value, decoder, run.seed))
        return ()
    with import_folder(source.path) as imported:
        tensors = imported.tensors
        demand_names(data.placed.model, tensors, whole=data.placed.world.size == 1)
        data.fill(lambda piece: tensors.part(piece.name, piece.box), buffers=True)
    return imported.left_out
