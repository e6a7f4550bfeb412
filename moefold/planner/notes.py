"""Notes about a run for its user, known before the first step. Imports no torch."""

from collections.abc import Iterator

from moefold.data.config import PythonStdlib
from moefold.finetune import DEFAULT_DATA
from moefold.layers.config import Selective
from moefold.model.config import Decoder
from moefold.model.families.folder import Folder
from moefold.planner.case import distinct_blocks
from moefold.planner.memory_saved import saved_bytes, saved_tensors
from moefold.run import Run
from moefold.spec.layer import Modules, Shape


def run_notes(run: Run) -> tuple[str, ...]:
    """Return notes on settings without effect, too long sequences, and defaults chosen for the run.

    Each is a line that begins with the path of its setting.
    """
    notes = step_notes(run)
    if isinstance(run.model, Folder) and run.data.train == (PythonStdlib(**DEFAULT_DATA),):
        no_data = (
            "data.train: no data is given, so the source code of Python's standard library is "
            "used; give your own with data.train=[{source: jsonl, files: [chats.jsonl]}]"
        )
        return (*notes, no_data)
    return notes


def folder_notes(run: Run) -> tuple[str, ...]:
    """Return notes on the folder of a run's model: defaults taken, and what is not read."""
    if not isinstance(run.model, Folder):
        return ()
    parsed = run.model.read_config()
    return tuple(f"{run.model.path}: {note}" for note in (*parsed.notes, *parsed.left_out))


def step_notes(run: Run) -> tuple[str, ...]:
    """Return the notes that do not depend on the training data."""
    decoder = run.decoder
    seq = run.data.seq
    notes = list(_useless_recompute_notes(run, decoder))
    ropes = (getattr(block.attention, "rope", None) for block in decoder.blocks)
    scalings = [s for rope in ropes if rope is not None for s in (rope.yarn, rope.bands) if s]
    contexts = [round(scaling.factor * scaling.original_length) for scaling in scalings]
    contexts += [] if decoder.context is None else [decoder.context]
    if contexts and seq > max(contexts):
        notes.append(
            f"data.seq: {seq} tokens exceed the model's context of {max(contexts)}, RoPE scaling "
            f"included; use data.seq={max(contexts)}"
        )
    return tuple(notes)


def _useless_recompute_notes(run: Run, decoder: Decoder) -> Iterator[str]:
    """Yield a note for each module whose recompute saves no activation memory."""
    record = run.layout.recompute
    sizes = run.layout.split
    if not isinstance(record, Selective):
        return
    # For a micro-batch of one row on each tensor rank.
    shape = Shape(decoder.hidden, rows=1, tp=sizes.tp, etp=sizes.etp, ep=sizes.ep)
    try:
        by_block = [saved_tensors(block, shape) for block in distinct_blocks(decoder)[0]]
    except ValueError:  # a layer of a plugin without a description of what it saves
        return
    modules: Modules = frozenset(record.modules)
    axes = {"tp": sizes.tp, "ep": sizes.ep, "etp": sizes.etp}
    split = " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1)
    for name in dict.fromkeys(record.modules):
        without = modules - {name}
        if all(
            saved_bytes(tensors, modules) >= saved_bytes(tensors, without) for tensors in by_block
        ):
            yield (
                f"layout.recompute: {name} saves no memory "
                f"{f'under {split}' if split else 'beside the other modules'}; leave it out"
            )
