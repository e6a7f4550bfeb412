"""Planted bugs: what goes on from memory when ranks have died."""

from tests.plants.plant import Plant

LIVED = "tests/gloo/test_faults_recover.py::test_kills_and_stops_change_no_bit_and_lose_no_sample"
EARLIER = "tests/gloo/test_comm_store.py::test_a_rank_does_not_meet_those_of_an_earlier_start"
ON_DISKS = "tests/gloo/test_checkpoint_local.py::"

PLANTS = (
    Plant(
        "only the rank whose read failed reports it",
        "tests/gloo/test_faults_policies.py::"
        "test_a_signal_or_a_failed_read_on_any_rank_ends_all_at_one_step",
        "training/reading.py",
        "if message is not None:",
        "if message is not None and rank == self._world.rank:",
    ),
    Plant(
        "a rank takes the ranks of an earlier start for those of its own",
        EARLIER,
        "comm/rendezvous.py",
        'if self._has(f"{round_}/all") and self._is_listed(round_):',
        'if self._has(f"{round_}/all"):',
    ),
    Plant(
        "every meeting has the same number",
        EARLIER,
        "comm/rendezvous.py",
        "self._own = secrets.token_hex(8)",
        "self._own = f'{info.rank}'",
    ),
    Plant(
        "copies in memory hold no optimizer state",
        LIVED,
        "training/trainer.py",
        "return [part.tensor.detach() for _, part in iter_state(self.state, self.optimizer)]",
        "return [held.tensor.detach() for held in self.state.weights()]",
    ),
    Plant(
        "weights that stay whole are not brought up to date with what came from memory",
        LIVED,
        "training/trainer.py",
        "            return False\n        self.state.refresh_weights()\n",
        "            return False\n",
    ),
    Plant(
        "a run that goes on from memory leaves a step out",
        LIVED,
        "training/trainer.py",
        "Progress.from_dict(progress)",
        "Progress.from_dict({**progress, 'step': progress['step'] + 1})",
    ),
    Plant(
        "copies on local disks are put together from two pasts",
        ON_DISKS + "test_two_pasts_are_never_mixed",
        "training/local.py",
        "holders.setdefault((copy.step, copy.session, copy.progress), {})",
        'holders.setdefault((copy.step, "", ""), {})',
    ),
    Plant(
        "copies on local disks are taken before newer checkpoints",
        ON_DISKS + "test_a_checkpoint_that_is_newer_is_taken",
        "training/trainer.py",
        "0 if checkpoint is None else manifest.read(checkpoint).step",
        "0",
    ),
)
