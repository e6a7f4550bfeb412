"""The run as an object: opening it, its steps, and the loop around them.

What is not the step is a hook; the loop knows none of them by name.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint import manifest
from moefold.checkpoint.errors import CheckpointError, DamagedError
from moefold.checkpoint.folder import newest, step_name
from moefold.checkpoint.lock import FolderLock
from moefold.comm.agree import on_first
from moefold.comm.collectives import gather_objects
from moefold.comm.world import World
from moefold.config.records import plain
from moefold.data.batch import MicroBatch
from moefold.data.loader import Loader
from moefold.data.prepare import Prepared, prepare
from moefold.data.prepare import Progress as Told
from moefold.data.tokenizer import Tokenizer
from moefold.files import demand_writable, named
from moefold.model.generate import generate
from moefold.optim.base import Optimizer
from moefold.optim.norm import clip_scale
from moefold.parallel.apply import build as build_parts
from moefold.parallel.data.sharding import Data
from moefold.parallel.pipeline.score import continuing
from moefold.planner.count import count
from moefold.planner.notes import notes
from moefold.run import Run, demand_fit
from moefold.training.begin import start_values
from moefold.training.copies import Copies
from moefold.training.exhausted import explained
from moefold.training.feed import Feed
from moefold.training.hooks.base import Figures, Hook
from moefold.training.machine import Utilisation
from moefold.training.nonfinite import Judge, Verdict
from moefold.training.precision import Format
from moefold.training.recover import Keeper, Past
from moefold.training.routing import routing
from moefold.training.same import demand_agreement, demand_same_run, parts_from_outside
from moefold.training.saving import Saver
from moefold.training.signals import heard
from moefold.training.state import Progress, contents, form, held_by, identity, restore
from moefold.training.step import StepFigures, evaluate, gradients
from moefold.training.stored import describe
from moefold.training.together import Together

FORMAT = 1
_log = logging.getLogger("moefold.training")


class Interrupted(Exception):
    """The run was asked to stop; it saved before it did."""


class Job:
    """A run that is open: its model, data and optimizer, and how far it is.

    Args:
        run: the run.
        folder: where everything it writes goes. A run found there is continued: at its newest
            complete checkpoint, if it computes the same; what differs is refused and listed.
        hooks: told of every event, in this order.
        cache: where prepared data is kept (default: beside the folder).
        world: the ranks that train; all of them open the run. Default: this process alone.
        keeper: copies of the state in memory, which the run goes on from if it holds any.
        told: told of what preparing data is at.
        scratch: a folder for a run that is only looked at: what of its data is not in ``cache``
            lies there, nothing else is written, and the run's folder is not locked.
        forks: another run's state is put in at once, so that no folder's weights are read.

    Every method is called on all ranks; hooks live on the first one, see ``together.py``.

    Attributes:
        run, format: the run, with the number format that it was settled to; that format, and why.
        model, optimizer, loader, tokenizer: its parts.
        progress: step, tokens, and what was left out of the data.
        last_step: the step at which :meth:`train` ends.
    """

    def __init__(
        self,
        run: Run,
        folder: str | Path,
        hooks: Sequence[Hook] = (),
        *,
        cache: str | Path | None = None,
        world: World | None = None,
        keeper: Keeper | None = None,
        told: Told | None = None,
        scratch: Path | None = None,
        forks: bool = False,
    ) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.world = world or World.single(device)
        self.device = self.world.device
        demand_fit(run, self.world.size)
        self.run, self.folder, self.hooks = run, Path(folder), tuple(hooks)
        self.last_step, self.keeper, self._forks = run.train.steps, keeper, forks
        self._together = Together(
            self.world,
            {
                "evaluate": self._evaluate,
                "save": self._save,
                "health": lambda: routing(self.placed),
                "pace": self._pace,
                "generate": self._generate,
            },
        )
        self.parts = parts_from_outside(run)
        if run.deterministic:
            # What cuBLAS needs to be so too; it is read before the first product on a device.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.lock = FolderLock(self.folder, run.name)
        cache = cache or self.folder.parent / ".prepared"
        self._prepare = partial(prepare, run.data, cache, told, scratch)
        self._first(partial(demand_writable, self.folder) if scratch else self.lock.acquire)
        self.saver = Saver(self.folder, run.watch.checkpoint, self.lock, self.world)
        try:
            with explained(run, self.world):
                self._open()
        except BaseException:
            self._release()
            raise

    def _first(self, function: Callable[[], object]) -> None:
        """Do something on the first rank; where it fails there, it fails on all."""

        def done() -> None:
            function()

        on_first(done, self.world.on_host)

    def _release(self) -> None:
        if self._together.leader:
            self.lock.release()

    def _open(self) -> None:
        self.format = Format.of(self.run, self.folder, self.world, self.keeper)
        self.run = run = self.format.settle(self.run)
        train, sizes = run.train, self.world.folding.sizes
        prepared = self._prepared()
        self.tokenizer: Tokenizer = prepared.tokenizer
        self.loader = Loader(
            prepared,
            run.data.seq,
            train.batch,
            train.micro_batch,
            run.seed,
            pad_to=sizes.tp * (2 * sizes.cp if sizes.cp > 1 else 1),
        )
        self.feed = Feed(self.loader, self.world)
        demand_agreement(run, self.parts, self.loader.fingerprint(), self.world)
        self.decoder = run.decoder()
        parts = build_parts(self.decoder, self.format.precision, run.layout, self.world, "meta")
        self.data = Data(parts)
        self.placed, self.model = self.data.placed, self.data.placed.model
        said = *notes(run), *self.start_values()
        if self._together.leader and not self.recovered:
            for line in said:
                _log.warning("%s", line)
        self.optimizer: Optimizer = self.data.optimizer(run.optim)
        self.progress = Progress()
        self.utilisation = Utilisation(self.format.machine, self.model.recipe.dtype, self.world)
        self.counts = count(self.decoder)
        self._busy_s, self.place = 0.0, 0
        self.judge = Judge(run.train.on_nonfinite)
        self._running = False
        # What was asked of this rank, and what all ranks have been told.
        self._asked: str | None = None
        self._stops: str | None = None
        same = identity(run, self.parts, self.loader.fingerprint(), self.world.size)
        made_of = form(self.data, self.optimizer)
        self.copies = Copies(run, self.folder, same, made_of, self.world, keeper=self.keeper)
        self.resumed_from: Path | None = None
        if not self._recall():
            self.resumed_from = self._resume()
        self.saver.prepare(partial(contents, self.data, self.optimizer))

    def _prepared(self) -> Prepared:
        """Make the run's data on the first rank and open it on all, once in this process."""
        kept = self.keeper and self.keeper.prepared
        self._first(lambda: kept or self._prepare())
        found = kept or self._prepare()
        if self.keeper is not None:
            self.keeper.prepared = found
        return found

    def start_values(self) -> tuple[str, ...]:
        """Give the model its values before step one; return what of a folder's is left out."""
        return start_values(self.run, self.decoder, self.data, self._forks)

    def _recall(self) -> bool:
        """Go on from copies in memory or on local disks, where some are whole and newest."""
        found = self.copies.take(self._state(), self._newest)
        if found is None:
            return False
        past, self.resumed_from = found
        self.data.renew()
        self.progress = past.progress
        self.judge.strikes, self.judge.struck_at = past.strikes, past.struck_at
        return True

    def _keep(self) -> None:
        """Copy the state of the present step, where copies are kept."""
        past = Past(self.progress, self.judge.strikes, self.judge.struck_at)
        self.copies.keep(past, self._state)

    def _state(self) -> list[torch.Tensor]:
        return [held.tensor.detach() for _, held in held_by(self.data, self.optimizer)]

    def _resume(self) -> Path | None:
        """Go on from the newest checkpoint whose every byte is as written; return it."""
        self.saver.wait()
        path = self._newest()
        while path is not None:
            stored = manifest.read(path)
            demand_same_run(path, stored.meta, self.run, self.parts, self.loader.fingerprint())
            damage: DamagedError | None = None
            try:
                self.progress = restore(path, self.data, self.optimizer)
            except DamagedError as error:
                damage = error
            told = gather_objects(damage and str(damage), self.world.on_host)
            said = [text for text in told if text]
            if not said:
                self.data.renew()
                return path
            older = self._newest(before=stored.step)
            if older is None:
                raise damage or CheckpointError(said[0])
            _log.warning("%s. Falling back to %s", said[0], older.name)
            path = older
        return None

    def _newest(self, before: int | None = None) -> Path | None:
        """Return the newest complete checkpoint as the first rank sees it."""
        first = partial(newest, self.folder, before=before)
        found = on_first(lambda: str(first() or ""), self.world.on_host)
        return Path(found) if found else None

    @property
    def recovered(self) -> dict[str, Any]:
        """What the ranks lived through before this attempt; see ``Keeper``."""
        return {} if self.keeper is None else self.keeper.recovered

    @property
    def step_number(self) -> int:
        """Optimizer steps done since the start of the run."""
        return self.progress.step

    @property
    def tokens(self) -> int:
        """Valid tokens trained on since the start of the run."""
        return self.progress.tokens

    def train(self) -> dict[str, float | int]:
        """Run to ``last_step``, save, and return the last step's figures.

        Raises:
            Interrupted: after a signal or a hook's request, once a checkpoint is saved.
            NonFiniteStep: where a step's loss or gradient is not finite and the policy says so.
        """
        metrics: Figures = {}
        error: BaseException | None = None
        with heard(self), explained(self.run, self.world), named(self.folder):
            try:
                self._start()
                self._keep()
                self._hear(lambda: None)
                while self.progress.step < self.last_step and self._stops is None:
                    metrics = self.step()
                self.save()
                self.saver.wait()
                reason, self._stops, self._asked = self._stops, None, None
                if reason is not None:
                    raise Interrupted(f"{reason}; saved step {self.progress.step}")
            except BaseException as caught:
                error = caught
                raise
            finally:
                self._stop(error)
        return metrics

    def _start(self) -> None:
        """Tell the hooks once, before the first step of this process."""
        if not self._running:
            self._running = True
            self._tell("on_start")

    def _tell(self, event: str, *given: Any) -> None:
        """Tell the hooks of an event, on the first rank; the others do what hooks ask for."""

        def tell() -> None:
            for hook in self.hooks:
                getattr(hook, event)(self, *given)

        self._hear(tell)

    def _hear(self, tell: Callable[[], None]) -> None:
        """Let the first rank tell its hooks, and all ranks know whether to stop."""
        self._stops = self._together.while_leading(tell, lambda: self._asked)

    def _stop(self, error: BaseException | None) -> None:
        """Tell every hook that the run ends; one that fails keeps none of the others from it."""
        if not self._running:
            return
        self._running = False
        failed: list[Exception] = []

        def tell() -> None:
            for hook in self.hooks:
                try:
                    hook.on_stop(self, error)
                except Exception as caught:
                    failed.append(caught)

        if error is None or isinstance(error, Interrupted):
            self._together.while_leading(tell, lambda: None)
        elif self._together.leader:
            tell()  # Others may have failed too, or be gone: nobody is waited for.
        for caught in failed:
            if error is None:
                raise caught
            _log.warning("a hook failed while the run ended: %s", caught)

    def step(self, batches: Sequence[MicroBatch] | None = None) -> Figures:
        """Make one optimizer step and return its figures.

        Args:
            batches: micro-batches to train on, this data rank's, of which each has as many;
                default those of the data's order.
        """
        self._start()
        self.saver.poll()
        started, waited = time.perf_counter(), self.world.recorder.waited_s
        run, place = self.run, self.progress.place()
        self.place = place
        given = self.feed.step(place) if batches is None else batches

        def compute() -> StepFigures:
            asked = self._asked is not None
            return gradients(self.data, given, run.train.loss_chunk, stop=asked)

        figures = compute()
        if figures.stop and self._asked is None:
            self._asked = "another rank was asked to stop"
        verdict = self.judge(self.progress.step, place, figures, given, self.data, compute)
        if verdict is Verdict.REWIND:
            self._rewind(place)
            return {}
        factor = run.optim.schedule_lr.factor(self.progress.step, run.train.steps)
        if verdict is Verdict.UPDATE:
            self.optimizer.step(clip_scale(figures.grad_norm, run.optim.clip_norm), factor)
            self.data.renew()
            for _, mixture in self.model.mixtures():
                mixture.balance.finish_step(mixture.router)
        self.progress.step += 1
        self.progress.tokens += figures.tokens
        seconds = time.perf_counter() - started
        self._busy_s += seconds - (self.world.recorder.waited_s - waited)
        metrics = self._figures(figures, factor, seconds)
        if verdict is Verdict.SKIP:
            metrics["skipped"] = 1
        self._tell("on_step", metrics)
        self._keep()
        return metrics

    def _figures(self, figures: StepFigures, factor: float, seconds: float) -> Figures:
        rates = self.optimizer.lr(factor)
        per_second = figures.tokens / seconds
        flops = self.counts.flops_per_token(self.run.data.seq, causal=True)
        metrics: Figures = {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "lm_loss": figures.lm_loss,
            "grad_norm": figures.grad_norm,
            "lr": next(iter(rates.values())),
            "tokens_per_s": per_second,
            **self.utilisation.figures(per_second * flops),
            "step_time_s": seconds,
        }
        metrics |= {f"lr/{kind}": rate for kind, rate in rates.items()} if len(rates) > 1 else {}
        return metrics | {f"router/{name}": value for name, value in figures.router_terms.items()}

    def _rewind(self, place: int) -> None:
        """Go back to the newest checkpoint, or the start, and leave ``place`` of the data out."""
        excluded = tuple(sorted({*self.progress.excluded, place}))
        if self._resume() is None:
            self.start_values()
            self.optimizer = self.data.optimizer(self.run.optim)
            self.progress = Progress()
        self.progress.excluded = tuple(sorted({*self.progress.excluded, *excluded}))
        self._tell("on_rewind")

    def evaluate(self, tokens: int | None = None) -> Figures:
        """Return loss and bits per byte on each held-out set.

        Args:
            tokens: about how many tokens of each set at most; default as the run says, or all.
        """
        return self._together.do("evaluate", tokens)

    def _evaluate(self, tokens: int | None) -> Figures:
        record = self.run.watch.evaluate
        if tokens is None and record is not None:
            ended = self.progress.step >= self.run.train.steps
            tokens = None if ended and record.at_end == "all" else record.tokens
        metrics: Figures = {}
        nats = labels = 0.0
        for name in self.loader.evaluation_sets:
            batches = self.feed.held_out(name, tokens)
            found, count_, n_bytes = evaluate(self.placed, batches, self.run.train.loss_chunk)
            metrics[f"val/{name}/loss"] = found / max(count_, 1)
            if n_bytes:
                metrics[f"val/{name}/bits_per_byte"] = found / math.log(2) / n_bytes
            nats, labels = nats + found, labels + count_
        if labels:
            metrics = {"val_loss": nats / labels, **metrics}
        self._tell("on_evaluate", metrics)
        return metrics

    def save(self) -> Path:
        """Write a checkpoint of the present step, if there is none yet, and return its folder."""
        return Path(self._together.do("save"))

    def _save(self) -> Path:
        self.saver.wait()
        present = self._newest()
        if present is not None and present.name == step_name(self.progress.step):
            return present
        progress = self.progress
        meta: dict[str, Any] = {
            "format": FORMAT,
            "run": plain(self.run),
            "precision": dict(self.format.began),
            **describe(self.decoder, self.tokenizer),
            "parts": self.parts,
            "data": self.loader.fingerprint(),
            "progress": {
                "step": progress.step,
                "tokens": progress.tokens,
                "excluded": list(progress.excluded),
            },
        }
        return self.saver.save(progress.step, contents(self.data, self.optimizer), meta)

    def health(self) -> list[dict[str, Any]]:
        """Return the figures of each mixture's routing in the last step, by layer."""
        return self._together.do("health")

    def pace(self) -> list[float]:
        """Return the seconds each rank was busy in steps since the last call, waits left out."""
        return self._together.do("pace")

    def _pace(self) -> list[float]:
        busy, self._busy_s = self._busy_s, 0.0
        return gather_objects(busy, self.world.on_host)

    def generate(self, prompts: list[list[int]], **how: Any) -> list[list[int]]:
        """Return what the model writes after each prompt; see :func:`moefold.model.generate`."""
        return self._together.do("generate", prompts, how)

    def _generate(self, prompts: list[list[int]], how: dict[str, Any]) -> list[list[int]]:
        return generate(continuing(self.placed), prompts, **how)

    def request_stop(self, reason: str) -> None:
        """Ask the loop to save and end after the present step; the first rank is asked."""
        self._asked = reason

    def close(self, error: BaseException | None = None) -> None:
        """Tell the hooks that the run ends here or failed with ``error``; give the folder back."""
        try:
            self._stop(error)
            if error is None:
                self.saver.wait()
        finally:
            self.saver.drop()
            self.copies.wait()
            self._release()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)
