"""Planted bugs: optimizers, their rates, and steps that are left out."""

from tests.plants.plant import Plant

MOMENTUM = "tests/cpu/test_optim_momentum.py::"
SGD_TORCH = MOMENTUM + "test_sgd_equals_torch_bit_for_bit"
LION_PAPER = MOMENTUM + "test_lion_is_what_its_paper_states"
STATE_STATED = MOMENTUM + "test_state_is_what_the_record_states_and_comes_back"
GROUPS = "tests/cpu/test_optim_groups.py::"
GROUPS_APART = GROUPS + "test_groups_are_updated_as_by_optimizers_of_their_own"
SKIP = "tests/cpu/test_training_skip.py::"
SKIPS = SKIP + "test_a_run_that_skips_a_batch_is_the_run_without_it"

PLANTS = (
    Plant(
        "Nesterov's update of SGD forgets the newest gradient",
        SGD_TORCH,
        "optim/sgd.py",
        "                direction = grads\n",
        "                direction = momenta\n",
    ),
    Plant(
        "weight decay of SGD is decoupled",
        SGD_TORCH,
        "optim/sgd.py",
        "            aten._foreach_add_(grads, params, alpha=weight_decay)\n",
        "            aten._foreach_mul_(params, 1 - lr * weight_decay)\n",
    ),
    Plant(
        "Lion's betas are exchanged",
        LION_PAPER,
        "optim/lion.py",
        "newest, kept = self.rule.betas",
        "kept, newest = self.rule.betas",
    ),
    Plant(
        "the scale of gradients is not applied to a momentum",
        SGD_TORCH,
        "optim/lists.py",
        "                if scale != 1:\n",
        "                if scale > 1:\n",
    ),
    Plant(
        "SGD without momentum is planned with a state",
        STATE_STATED,
        "optim/config.py",
        'return ("momentum",) if self.momentum else ()',
        'return ("momentum", "step") if self.momentum else ("step",)',
    ),
    Plant(
        "a piece of a list of tensors is left out",
        SGD_TORCH,
        "optim/lists.py",
        "                yield taken\n                taken = [[] for _ in lists]\n",
        "                taken = [[] for _ in lists]\n",
    ),
    Plant(
        "a group's rate does not reach the rest of Muon",
        GROUPS_APART,
        "optim/muon.py",
        "AdamWOptimizer(rule.rest, rest, parameter_groups=rule.groups)",
        "AdamWOptimizer(rule.rest, rest)",
    ),
    Plant(
        "a group's weight decay reaches norms",
        GROUPS_APART,
        "optim/config.py",
        "group.weight_decay is not None and weight_decay is not None:",
        "group.weight_decay is not None:",
    ),
    Plant(
        "the rate of a momentum does not follow the schedule",
        SGD_TORCH,
        "optim/lists.py",
        "                lr = settings.lr * lr_factor\n",
        "                lr = settings.lr\n",
    ),
    Plant(
        "the head is in no group of its name",
        GROUPS + "test_a_run_states_its_groups_and_trains_by_them",
        "optim/config.py",
        '"head": ("head.*",)',
        '"head": ("embed.*",)',
    ),
    Plant(
        "a step skipped by its norm advances the schedule",
        SKIPS,
        "training/state.py",
        "return self.step - self.skipped",
        "return self.step",
    ),
    Plant(
        "a step skipped by its norm updates the selection bias",
        SKIPS,
        "training/trainer.py",
        "clip_scale(figures.grad_norm, run.optim.clip_norm), lr_factor)\n            self.state",
        "clip_scale(figures.grad_norm, run.optim.clip_norm), lr_factor)\n        self.state",
    ),
    Plant(
        "the count of skipped steps is lost on resume",
        SKIPS,
        "training/state.py",
        '        values["excluded"] = tuple(stored["excluded"])\n',
        '        values["excluded"] = tuple(stored["excluded"])\n        values["skipped"] = 0\n',
    ),
    Plant(
        "steps with large gradients are skipped without end",
        SKIP + "test_a_limit_of_steps_in_a_row_ends_the_run",
        "training/nonfinite.py",
        "        if progress.strikes > bound.limit:\n",
        "        if progress.strikes > bound.limit + 9:\n",
    ),
    Plant(
        "the split of exponents in QK-clip is exchanged",
        "tests/cpu/test_optim_qk_clip.py::test_heads_beyond_the_bound_are_scaled_to_it",
        "parallel/data/qk_clip.py",
        ".amin(1) ** (1 - alpha)",
        ".amin(1) ** alpha",
    ),
)
