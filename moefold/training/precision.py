"""Precision of a run: the compute format of its products, chosen once when the run is opened."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint import manifest
from moefold.checkpoint.folder import find_newest
from moefold.comm.agree import run_on_first
from moefold.comm.world import World
from moefold.kernels.quantise.config import Quantise
from moefold.kernels.scaled.choose import require_available
from moefold.layers.config import Precision, faster_precision, slowdown
from moefold.run import Run
from moefold.training.machine import MatrixRate, device_name, matrix_rates
from moefold.training.model_checkpoint import precision_of
from moefold.training.recover import MemoryCheckpoint

_log = logging.getLogger("moefold.training")


@dataclass(frozen=True)
class PrecisionChoice:
    """The compute format of a run's products, and the reason for it."""

    precision: Precision
    why: str
    machine: MatrixRate
    """This machine's rate in ``precision``."""
    rates: Mapping[str, float]
    """FLOP/s of products on this machine, by format."""
    initial: Mapping[str, Any]
    """For the checkpoint: the setting when the run began, and the rates measured then."""

    @classmethod
    def choose(
        cls, run: Run, folder: Path, world: World, memory: MemoryCheckpoint | None = None
    ) -> "PrecisionChoice":
        """Choose the format on rank 0, for all ranks.

        ``auto`` is the format in which the run in ``folder`` began, else the faster one on this
        machine. A format that is slower than another by 2x or more causes a warning. If there are
        copies in ``memory``, nothing is measured again.
        """
        setting = run.train.precision
        recovered = {} if memory is None else memory.format

        def read_or_measure() -> dict[str, Any]:
            if recovered:
                return recovered
            path = find_newest(folder)
            meta = {} if path is None else manifest.read(path).meta
            stored = precision_of(meta)
            default: Precision = "bf16" if setting == "auto" else setting
            measured = matrix_rates(world.device, default, stored or default).items()
            return {
                "stored": stored,
                "initial": meta.get("precision"),
                "rates": {name: rate.flops_per_s for name, rate in measured},
                "sources": {name: rate.source for name, rate in measured},
            }

        facts = run_on_first(read_or_measure, world.on_host)
        rates = facts["rates"]
        stored = facts["stored"]
        if stored is not None and setting in ("auto", stored):  # Stored run files name the format.
            precision = stored
            why = "kept from the run's start"
        elif setting != "auto":
            precision = setting
            why = "set explicitly"
        else:
            precision = faster_precision(rates)
            why = "auto"
        initial = facts["initial"] or {}
        if not (initial or stored):
            initial = {"asked": setting, "flops_per_s": rates, "device": device_name(world.device)}
        machine = MatrixRate(rates[precision], facts["sources"][precision])
        choice = cls(precision, why, machine, rates, initial)
        if memory is not None:
            memory.format = {**facts, "stored": precision, "initial": choice.initial}
        if world.rank == 0 and not recovered:
            choice.warn()
        return choice

    def apply_to(self, run: Run) -> Run:
        """Return the run with this format as its ``train.precision``."""
        train = run.train.model_copy(update={"precision": self.precision})
        return run.model_copy(update={"train": train})

    def warn(self) -> None:
        """Warn if another format is faster on this machine by 2x or more."""
        slower = slowdown(self.precision, self.rates)
        if slower is None:
            return
        faster, factor = slower
        _log.warning(
            "train.precision %s (%s): its matrix products are %.1f times slower here than those of "
            "%s (%s). A new run with train.precision=auto uses the faster format",
            self.precision, self.why, factor, faster, self.rates_text,
        )  # fmt: skip

    @property
    def rates_text(self) -> str:
        """The rates as text."""
        gigaflops = {name: rate / 1e9 for name, rate in self.rates.items()}
        rates = [f"{name} {rate:,.0f}" for name, rate in gigaflops.items()]
        return f"{', '.join(rates)} GFLOP/s"


def configure_matmuls(run: Run, device: torch.device) -> None:
    """Make bf16 products accumulate in fp32; make all operations deterministic if the run is.

    Raises:
        ValueError: if the back end of quantised products that the run names is not available.
    """
    if isinstance(quantise := run.train.quantise, Quantise) and run.train.precision != "fp64":
        require_available(quantise.backend, device)
    # Otherwise partial sums may be rounded to bf16 before they are added.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if run.deterministic:
        # Required by cuBLAS, which reads it before the first product on a device.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
