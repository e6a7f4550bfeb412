"""The trainer: an open run, its optimizer steps, and the loop around them.

Everything outside the step is a hook; the trainer knows no hook by name.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moefold.checkpoint import manifest
from moefold.checkpoint.errors import CheckpointError, DamagedError
from moefold.checkpoint.folder import find_newest, require_not_checkpoint, step_name
from moefold.checkpoint.lock import FolderLock
from moefold.comm.agree import run_on_first
from moefold.comm.collectives import gather_objects
from moefold.comm.world import World
from moefold.config.base import to_dict
from moefold.config.slot import build
from moefold.data.batch import MicroBatch
from moefold.data.config import DataError
from moefold.data.prepare import Progress as OnProgress
from moefold.data.prepare import prepare
from moefold.files import path_in_errors, require_writable
from moefold.optim.norm import clip_scale
from moefold.optim.rates import rate_factor
from moefold.parallel.apply import build_parts
from moefold.parallel.data.sharding import ShardedState
from moefold.planner.count import count
from moefold.planner.notes import run_notes
from moefold.run import Run
from moefold.training.continuation import continue_steps, open_loader
from moefold.training.distributed import RankZeroRunner, on_all_ranks, single_rank, stop_on_signals
from moefold.training.evaluate import evaluate_sets
from moefold.training.figures import StepFigures, routing_health
from moefold.training.hooks.base import HOOKS, Figures, Hook, call_hooks, hook_states, stop_hooks
from moefold.training.local import LocalCopies
from moefold.training.losses.base import Objective
from moefold.training.machine import Utilisation
from moefold.training.memory import (
    explaining_oom,
    heap_frozen,
    require_host_memory,
    resolve_recompute,
)
from moefold.training.model_checkpoint import describe_model, fill_initial_values
from moefold.training.nonfinite import decide_update
from moefold.training.precision import PrecisionChoice, configure_matmuls
from moefold.training.reading import ReadError, StepReader
from moefold.training.recover import MemoryCheckpoint
from moefold.training.resume import check_ranks_agree, check_same_run, plugin_digests, run_digest
from moefold.training.routing import step_executor
from moefold.training.routing_generation import generate_texts
from moefold.training.saving import Saver
from moefold.training.state import (
    Progress,
    assigned_state,
    full_weights,
    iter_state,
    restore,
    signature,
)
from moefold.training.step import gradients
from moefold.training.traced import Traced

_log = logging.getLogger("moefold.training")


class Interrupted(Exception):
    """The run was asked to stop, and saved a checkpoint before it did."""


class Trainer(Traced):
    """An open run: its model, data, optimizer and progress.

    Args:
        run: the run.
        folder: the output folder. A run in it is resumed from its newest complete checkpoint; a
            run that computes something else is refused, with a list of the differences.
        hooks: called at every event, in this order.
        cache: folder for prepared data (default: next to ``folder``).
        world: the ranks that train, all of which open the run. Default: this process alone.
        memory: copies of the state in memory, from which the run resumes if there are any.
        on_progress: called with the progress of data preparation.
        scratch: for a dry run, a folder for prepared data that is not in ``cache``. Nothing else is
            written, the run's folder is not locked, and tensors have neither values nor memory.
        is_fork: another run's state follows, so that no initial weights are read from a folder.

    All ranks must call every method; hooks run on rank 0 only (``RankZeroRunner``).

    Attributes:
        run, precision: the run with its number format filled in; that format and its reason.
        model, optimizer, loader, tokenizer: the run's parts on this rank.
        progress: steps, tokens, and places of the data order that rewinds left out.
        hook_states: states of rank 0's hooks, of the checkpoint and then after each event.
        last_step: the step at which :meth:`train` ends.
        rank_zero: makes all ranks run the methods that hooks call on rank 0.
    """

    def __init__(
        self,
        run: Run,
        folder: str | Path,
        hooks: Sequence[Hook] = (),
        *,
        cache: str | Path | None = None,
        world: World | None = None,
        memory: MemoryCheckpoint | None = None,
        on_progress: OnProgress | None = None,
        scratch: Path | None = None,
        is_fork: bool = False,
    ) -> None:
        self.world = world or single_rank(run)
        self.device = self.world.device
        self.run = run
        self.folder = Path(folder)
        self.hooks = tuple(hooks)
        self.memory = memory
        self.last_step = run.train.steps
        self._is_fork = is_fork
        self.progress = Progress()
        self.batch_index = 0
        self._running = False
        self._closed = False
        self.resumed_from: Path | None = None
        self.hook_states: dict[str, Any] = {}
        # The step whose checkpoint this process has read completely, or written.
        self._saved: int | None = None
        # Reasons to stop: requested on this rank, and agreed by all ranks.
        self._stop_request: str | None = None
        self._agreed_stop: str | None = None
        self.rank_zero = RankZeroRunner(self.world, self)
        self.lock = FolderLock(self.folder, run.name)
        cache = cache or self.folder.parent / ".prepared"
        is_dry = scratch is not None
        self._claim_folder(is_dry)
        try:
            with explaining_oom(run, self.world):
                self._open_data(Path(cache), on_progress, scratch)
                self._build_parts(is_dry)
                self._restore(is_dry)
        except BaseException:
            self.lock.release()  # held by rank 0 only
            raise

    def _claim_folder(self, is_dry: bool) -> None:
        """Lock the run's folder on rank 0; a dry run only checks that it could be written."""
        run_on_first(partial(require_not_checkpoint, self.folder), self.world.on_host)
        claim = partial(require_writable, self.folder) if is_dry else self.lock.acquire
        run_on_first(claim, self.world.on_host)

    def _open_data(self, cache: Path, on_progress: OnProgress | None, scratch: Path | None) -> None:
        """Choose what the run leaves open, and open its data, alike on all ranks."""
        world = self.world
        self.plugins = plugin_digests(self.run)
        configure_matmuls(self.run, self.device)
        self.precision = PrecisionChoice.choose(self.run, self.folder, world, self.memory)
        run = self.precision.apply_to(self.run)
        if scratch is None:  # a dry run allocates no tensors
            require_host_memory(run, world)
        self.run = run = resolve_recompute(run, world)
        prepared = lru_cache(partial(prepare, run.data, cache, on_progress, scratch))
        run_on_first(lambda: bool(prepared()), world.on_host)  # others open them later
        self.tokenizer = prepared().tokenizer
        self.loader = open_loader(run, prepared(), world)
        self.reader = StepReader(self.loader, world)
        check_ranks_agree(run, self.plugins, self.loader.fingerprint(), world)

    def _build_parts(self, is_dry: bool) -> None:
        """Build model, optimizer, executor and what saves them; in a dry run without memory."""
        run = self.run
        world = self.world
        parts = build_parts(run.decoder, self.precision.precision, run.layout, world, "meta")
        with FakeTensorMode(allow_non_fake_inputs=True) if is_dry else nullcontext():
            self.state = ShardedState(parts, has_values=not is_dry)
            self.optimizer = self.state.optimizer(run.optim)
        self.parts = self.state.parts
        self.model = self.parts.model
        self.executor = step_executor(self.state, run.train.routing)
        self.counts = count(run.decoder)
        self.utilisation = Utilisation(
            self.precision.machine, self.model.precision_policy.dtype, world
        )
        record = run.watch.checkpoint
        self.saver = Saver(self.folder, record, self.lock, world)
        run_id = run_digest(run, self.plugins, self.loader.fingerprint(), world.size)
        state_id = signature(self.state, self.optimizer)
        self.local = record.local and LocalCopies(
            record.local, self.folder, run_id, state_id, world
        )

    def _restore(self, is_dry: bool) -> None:
        """Fill the state: from copies or a checkpoint of this run, else with initial values."""
        run = self.run
        notes = run_notes(run)
        restored = self._restore_copies()
        if not restored:
            notes = (*notes, *fill_initial_values(run, self.state, self._is_fork))
        if not self.recovered:
            self._warn(notes)
        if not restored:
            self.resumed_from = self._resume()
        self.progress, notes = continue_steps(self.progress, run, self.loader)
        self._warn(notes)
        if not is_dry:
            self.saver.allocate_copies(partial(assigned_state, self.state, self.optimizer))

    def _warn(self, notes: Iterable[str]) -> None:
        """Write notes to the log, on rank 0."""
        for note in notes if self.rank_zero.is_leader else ():
            _log.warning("%s", note)

    def _restore_copies(self) -> bool:
        """Resume from memory or local disk copies if complete and newest; return whether it did."""
        progress = self.memory and self.memory.restore(self._state_tensors(), self.world)
        if progress is None and self.local is not None:
            checkpoint = self._newest_checkpoint()
            since = 0 if checkpoint is None else manifest.read(checkpoint).step
            if restored := self.local.restore(self._state_tensors(), since):
                progress, self.resumed_from = restored
        if progress is None:
            return False
        self.state.refresh_weights()
        self.progress = Progress.from_dict(progress)
        self.hook_states = progress.get(HOOKS, {})
        return True

    def _save_copies(self, rewound: bool = False) -> None:
        """Copy the state to memory or local disk, if configured; ``rewound``: after a rewind."""
        for copies in filter(None, (self.memory, self.local)):
            progress = {**self.progress.to_dict(), HOOKS: self.hook_states}
            copies.save(progress, self._state_tensors, rewound)
        self.state.flush()

    def _state_tensors(self) -> list[torch.Tensor]:
        return [part.tensor.detach() for _, part in iter_state(self.state, self.optimizer)]

    def _resume(self) -> Path | None:
        """Resume from the newest undamaged checkpoint; return its path, or None without one."""
        self.saver.poll(wait=True)
        path = self._newest_checkpoint()
        while path is not None:
            stored = manifest.read(path)
            check_same_run(path, stored.meta, self.run, self.plugins, self.loader.fingerprint())
            damage: DamagedError | None = None
            try:
                self.progress = restore(path, self.state, self.optimizer)
            except DamagedError as error:
                damage = error
            by_rank = gather_objects(damage and str(damage), self.world.on_host)
            report = next(filter(None, by_rank), None)
            if report is None:
                self.state.refresh_weights()
                self._saved = stored.step
                self.hook_states = stored.meta.get(HOOKS, {})
                return path
            older = self._newest_checkpoint(before=stored.step)
            if older is None:
                raise damage or CheckpointError(report)
            _log.warning("%s. Falling back to %s", report, older.name)
            path = older
        return None

    def _newest_checkpoint(self, before: int | None = None) -> Path | None:
        """Return the newest complete checkpoint (before a step), as rank 0 sees it."""
        find = partial(find_newest, self.folder, before=before)
        path = run_on_first(lambda: str(find() or ""), self.world.on_host)
        return Path(path) if path else None

    @property
    def recovered(self) -> dict[str, Any]:
        """Facts about the loss of ranks before this attempt (``MemoryCheckpoint.recovered``)."""
        return {} if self.memory is None else self.memory.recovered

    @property
    def continues(self) -> bool:
        """Whether the run resumed from its own state, and did not begin here or as a fork."""
        return self.resumed_from is not None or bool(self.recovered)

    @property
    def step_number(self) -> int:
        """Optimizer steps done since the start of the run."""
        return self.progress.step

    @property
    def tokens(self) -> int:
        """Valid tokens trained on since the start of the run."""
        return self.progress.tokens

    @cached_property
    def objective(self) -> Objective:
        """The loss; first accessed by all ranks together, before a step or an evaluation."""
        return build(self.run.train.loss).setup(self)

    def train(self) -> dict[str, float | int]:
        """Train to ``last_step``, save, and return the last step's metrics.

        Raises:
            Interrupted: after a signal or a hook's request, once a checkpoint is saved.
            NonFiniteStep, LargeGradients: after a step that the policies do not let pass.
        """
        metrics: Figures = {}
        error: BaseException | None = None
        oom_explained = explaining_oom(self.run, self.world)
        with stop_on_signals(self), oom_explained, path_in_errors(self.folder), heap_frozen():
            try:
                self._start_hooks()
                self._save_copies()
                self._agreed_stop = self.rank_zero.lead(lambda: None, lambda: self._stop_request)
                while self.progress.step < self.last_step and self._agreed_stop is None:
                    metrics = self.step()
                self.save()
                self.saver.wait()
                reason = self._agreed_stop
                self._agreed_stop = None
                self._stop_request = None
                if reason is not None:
                    self.reader.raise_failure()
                    raise Interrupted(f"{reason}; saved step {self.progress.step}")
            except BaseException as caught:
                error = caught
                is_alone = self.world.size == 1
                # All ranks, or the only one, are here, and nothing of a step has happened.
                if isinstance(caught, ReadError) or (is_alone and isinstance(caught, DataError)):
                    self.save()
                raise
            finally:
                self._stop_hooks(error)
        return metrics

    def step(self, batches: Sequence[MicroBatch] | None = None) -> Figures:
        """Run one optimizer step and return its metrics.

        Args:
            batches: this data rank's micro-batches, as many as on every other; default: the next
                ones of the data order.
        """
        self._start_hooks()
        self.saver.poll()
        started = time.monotonic()
        waited = self.world.recorder.waited_s
        run = self.run
        step = self.progress.step
        self.batch_index = index = self.progress.next_batch_index()
        self.model.precision_policy.seed = run.seed
        self.model.precision_policy.step = step
        if self._agreed_stop is not None:  # after which a caller of steps goes on
            self.reader.raise_failure()
        micros = self.reader.read(index) if batches is None else batches
        if batches is None and step + 1 < self.last_step:
            following = replace(self.progress, step=step + 1).next_batch_index()
            if failure := self.reader.read_ahead(following):
                self.request_stop(failure)

        def forward_backward() -> StepFigures:
            stop = self._stop_request is not None
            loss = self.objective
            return gradients(self.state, micros, run.train.loss_chunk, stop, self.executor, loss)

        figures = forward_backward()
        if figures.stop and self._stop_request is None:
            self._stop_request = "another rank was asked to stop"
        now = self.progress
        decision = decide_update(run.train, now, figures, micros, self.state, forward_backward)
        if decision == "rewind":
            self._rewind(index)
            return {}
        lr_factor = rate_factor(now.rate, run.optim.schedule_lr, now.updates)
        if decision == "update":
            self.optimizer.step(clip_scale(figures.grad_norm, run.optim.clip_norm), lr_factor)
            self.state.end_step()
        now.step += 1
        now.tokens += figures.tokens
        now.skipped += decision == "skip"
        self._window = started, time.monotonic()
        seconds = self._window[1] - started
        self._busy_s += seconds - (self.world.recorder.waited_s - waited)
        metrics = self._metrics(figures, lr_factor, seconds)
        if decision == "skip":
            metrics |= {"skipped": 1, "skipped_steps": now.skipped}
        self._call_hooks("on_step", metrics)
        self._save_copies()
        return metrics

    def _metrics(self, figures: StepFigures, lr_factor: float, seconds: float) -> Figures:
        rates = self.optimizer.lr(lr_factor)
        per_second = figures.tokens / seconds
        flops = self.counts.flops_per_token(self.run.data.seq, causal=True)
        metrics: Figures = {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "lr": next(iter(rates.values())),
            "tokens_per_s": per_second,
            **self.utilisation.figures(per_second * flops),
            "step_time_s": seconds,
        }
        metrics |= {f"lr/{kind}": rate for kind, rate in rates.items()} if len(rates) > 1 else {}
        return metrics | figures.by_name

    def _rewind(self, index: int) -> None:
        """Return to the newest checkpoint, or the start; exclude the batch ``index``."""
        before = self.progress
        if self._resume() is None:
            fill_initial_values(self.run, self.state, self._is_fork)
            self.optimizer = self.state.optimizer(self.run.optim)
            self.progress = Progress(rate=before.rate)
            self.hook_states = {}
        self.progress.excluded = tuple(sorted({*self.progress.excluded, *before.excluded, index}))
        self.progress.strikes = before.strikes
        self.progress.struck_at = before.struck_at
        self._saved = None  # the stored checkpoint of this step lacks the exclusion
        self._call_hooks("on_rewind")
        self._save_copies(rewound=True)

    def _start_hooks(self) -> None:
        """Call the hooks' ``on_start`` once, before the first step of this process."""
        if self._closed:
            raise ValueError(f"the run in {self.folder} is closed; open it again to continue it")
        if not self._running:
            self._running = True
            self._call_hooks("on_start")

    def _call_hooks(self, event: str, *args: Any) -> None:
        """Call the hooks for an event on rank 0, and agree on all ranks whether to stop."""
        call = partial(call_hooks, self.hooks, event, self, *args)
        answer = self.rank_zero.lead(call, lambda: [self._stop_request, hook_states(self.hooks)])
        self._agreed_stop, self.hook_states = answer

    def _stop_hooks(self, error: BaseException | None) -> None:
        """Call every hook's ``on_stop``, also after one of them fails."""
        if not self._running:
            return
        self._running = False
        # After an error without waiting: other ranks may have failed or exited.
        if error is None or isinstance(error, Interrupted):
            self.rank_zero.lead(partial(stop_hooks, self.hooks, self, error), lambda: None)
        elif self.rank_zero.is_leader:
            stop_hooks(self.hooks, self, error)

    @on_all_ranks
    def evaluate(self, tokens: int | None = None) -> Figures:
        """Return loss and bits per byte on each held-out set, of about ``tokens`` each.

        Without a number it is ``watch.evaluate``'s, or all.
        """
        record = self.run.watch.evaluate
        if tokens is None and record is not None:
            is_finished = self.progress.step >= self.run.train.steps
            tokens = None if is_finished and record.at_end == "all" else record.tokens
        loss_chunk = self.run.train.loss_chunk
        loss = self.objective
        metrics = evaluate_sets(self.parts, self.loader, tokens, loss_chunk, loss)
        self._call_hooks("on_evaluate", metrics)
        return metrics

    @on_all_ranks
    def save(self) -> Path:
        """Write a checkpoint of the current step, and return its folder.

        An existing one is kept only if this process wrote it or read it completely.
        """
        self.saver.poll(wait=True)
        present = self._newest_checkpoint()
        step = self.progress.step
        if present is not None and present.name == step_name(step) and self._saved == step:
            return present
        index = self.progress.next_batch_index()
        meta: dict[str, Any] = {
            "format": 1,
            "run": to_dict(self.run),
            "precision": dict(self.precision.initial),
            **describe_model(self.run.decoder, self.tokenizer),
            "parts": self.plugins,
            "data": self.loader.fingerprint(),
            "progress": self.progress.to_dict(),
            "sources": [each.to_dict() for each in self.loader.given(index)],
            HOOKS: hook_states(self.hooks),  # of the first rank, which writes the manifest
        }
        path = self.saver.save(step, assigned_state(self.state, self.optimizer), meta)
        self._saved = step
        self.state.flush()
        return path

    @on_all_ranks
    def health(self) -> list[dict[str, Any]]:
        """Return the last step's routing statistics of each mixture, ordered by layer."""
        return routing_health(self.parts)

    @on_all_ranks
    def weights(self, pattern: str) -> dict[str, torch.Tensor]:
        """Return the parameters whose global names match a pattern, whole and on the host."""
        return full_weights(self.state, pattern)

    @on_all_ranks
    def generate(self, prompts: list[list[int]], **options: Any) -> list[list[int]]:
        """Return the token ids generated after each prompt; options of ``generate_texts``."""
        return generate_texts(self.parts, prompts, self.progress.step, **options)

    @on_all_ranks
    def offload_all(self) -> int:
        """Move everything to host memory until the next step, pass or save; return its bytes."""
        self.executor = step_executor(self.state, self.run.train.routing)  # frees what it holds
        return self.state.move_out(self.optimizer) + self.objective.move_out()

    def request_stop(self, reason: str) -> None:
        """Ask the trainer to save and end after the current step, from any rank."""
        self._stop_request = reason

    def close(self, error: BaseException | None = None) -> None:
        """End the run, failed if there is an ``error``: call the hooks, release the folder."""
        with ExitStack() as stack:
            self._closed = True
            stack.callback(self.lock.release)
            if self.local is not None:
                stack.callback(self.local.wait)
            stack.callback(self.saver.abandon)
            if error is None:
                stack.callback(self.saver.wait)
            self._stop_hooks(error)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)
