"""The run file: everything one training run says, and how it is read.

``model``, ``data``, ``optim`` and ``train`` say what is computed and are the run's identity;
``layout`` says where and never changes the maths; ``watch`` says what is seen.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from moefold.config.base import Record
from moefold.config.load import Loaded, load
from moefold.config.problems import Violation
from moefold.data.config import Data
from moefold.model.config import MODEL, Decoder
from moefold.model.families import deepseek_v3, mixtral, olmoe, qwen3_moe  # noqa: F401  (each registers itself)
from moefold.optim.config import OPTIMIZER
from moefold.training.config import Layout, Train
from moefold.training.hooks.config import Watch

RECIPES = Path(__file__).parent / "recipes"
IDENTITY = ("seed", "model", "data", "optim", "train")
"""Fields that say what is computed; a folder of checkpoints continues only where they agree."""


class Run(Record):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0)] = 1
    deterministic: bool = False
    """Two runs are equal bit for bit, at some cost of speed."""
    model: Annotated[Record, MODEL]
    data: Data
    optim: Annotated[Record, OPTIMIZER]
    train: Train
    layout: Layout = Layout()
    watch: Watch = Watch()
    uses: tuple[str, ...] = ()
    """Python files from outside the package that register parts."""
