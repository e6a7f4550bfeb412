"""Planted bugs: checkpoints of several ranks, and weights handed on."""

from tests.plants.plant import Plant

TOGETHER = "tests/gloo/test_checkpoint_together.py::"
JOBS = "tests/gloo/test_checkpoint_jobs.py::"
RESHARD = "tests/gloo/test_checkpoint_reshard.py::"
LAYOUTS = "tests/gloo/test_convert_layouts.py::"
KEPT = "tests/cpu/test_checkpoint_coverage.py::test_all_that_is_kept_between_steps_is_saved"
BEHIND = JOBS + "test_checkpoints_behind_the_steps_hold_the_state_of_their_own_step"
DEALT = JOBS + "test_data_goes_on_where_it_was_when_the_number_of_data_ranks_changes"
HANDED = LAYOUTS + "test_weights_are_handed_on_from_any_layout_as_they_are"

PLANTS = (
    Plant(
        "what some ranks left out is published",
        TOGETHER + "test_boxes_of_some_ranks_alone_are_never_published",
        "checkpoint/save.py",
        "        for name, what in manifest.contradictions(record):\n",
        "        for name, what in list[tuple[str, str]]():\n",
    ),
    Plant(
        "all ranks save their experts under the first rank's numbers",
        LAYOUTS + "test_every_expert_of_every_rank_is_in_its_place",
        "layers/placement.py",
        "        box[dim] = share(shape[dim], ranks, index)\n",
        "        box[dim] = share(shape[dim], ranks, 0 if axis == 'ep' else index)\n",
    ),
    Plant(
        "the rows of a slice are counted from the start of the tensor",
        LAYOUTS + "test_every_expert_of_every_rank_is_in_its_place",
        "checkpoint/load.py",
        "destination = target[relative_slices(overlap, box)]",
        "destination = target[relative_slices(overlap, overlap)]",
    ),
    Plant(
        "first moments are left out of checkpoints",
        KEPT,
        "training/state.py",
        "    yield from ((part.name, part) for part in state.optimizer_state(optimizer))\n",
        "    for held in state.optimizer_state(optimizer):\n"
        "        if not held.name.endswith('exp_avg'):\n"
        "            yield held.name, held\n",
    ),
    Plant(
        "the selection bias is left out of checkpoints",
        KEPT,
        "training/state.py",
        "    yield from ((MODEL_PREFIX + part.name, part) for part in state.weights())\n",
        "    for held in state.weights():\n"
        "        if 'selection_bias' not in held.name:\n"
        "            yield MODEL_PREFIX + held.name, held\n",
    ),
    Plant(
        "what is saved behind the steps is written from the live state",
        BEHIND,
        "training/saving.py",
        "                copied[name].append(replace(part, tensor=buffer))\n",
        "                copied[name].append(part)\n",
    ),
    Plant(
        "the second save behind the steps writes the first one's bytes",
        BEHIND,
        "training/saving.py",
        "                buffer.copy_(tensor, non_blocking=True)\n",
        "                if not buffer.any():\n                    buffer.copy_(tensor)\n",
    ),
    Plant(
        "data ranks have an order each",
        DEALT,
        "data/loader.py",
        "        mine = [self.load_micro_batch(step, j) "
        "for j in range(self._rank, count, self._ranks)]\n",
        "        at, by = self._rank, self._ranks\n"
        "        mine = [self.load_micro_batch(step + at, j) for j in range(at, count, by)]\n",
    ),
    Plant(
        "a run that goes on begins the data anew",
        DEALT,
        "training/state.py",
        'Progress.from_dict(meta["progress"])',
        'Progress.from_dict(meta["progress"] | {"step": 0})',
    ),
    Plant(
        "router weights are handed on in the narrow type",
        HANDED,
        "convert/plan.py",
        '    exact: str = ".router.",\n',
        '    exact: str = "no such name",\n',
    ),
)
