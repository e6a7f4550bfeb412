"""Parts that files from outside the package register, forgotten again."""

import sys

from moefold.config.plugins import MODULE_PREFIX
from moefold.data.config import SOURCE
from moefold.layers.config import ATTENTION
from moefold.model.config import MODEL
from moefold.moe.config import BALANCE, ROUTER
from moefold.moe.dispatch.config import DISPATCH
from moefold.optim.config import OPTIMIZER
from moefold.training.hooks.config import HOOKS
from moefold.training.losses.config import LOSS

SLOTS = (ATTENTION, BALANCE, DISPATCH, HOOKS, LOSS, MODEL, OPTIMIZER, ROUTER, SOURCE)


def forget() -> None:
    """Be a process that never saw the parts from outside."""
    for slot in SLOTS:
        for kind in [k for k, r in slot.kinds.items() if r.__module__.startswith(MODULE_PREFIX)]:
            del slot.kinds[kind]
    for name in [name for name in sys.modules if name.startswith(MODULE_PREFIX)]:
        del sys.modules[name]
