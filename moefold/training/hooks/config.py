"""Records of what is logged, evaluated and saved; none of them changes what is computed."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from moefold.checkpoint.config import CheckpointPolicy
from moefold.comm.config import Survive
from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.slot import Slot
from moefold.layers.config import Size

HOOKS = Slot("hook")

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class ProgressDisplay(Record):
    """What the console shows during the run."""

    style: Literal["auto", "bar", "lines", "off"] = "auto"
    """``auto`` is a live bar on a terminal and plain lines elsewhere."""
    seconds: Positive = 5.0
    """Minimum interval between plain lines."""

    owner = "moefold.training.hooks.progress:ProgressHook"


class Wandb(Record):
    """Sends the metrics to Weights & Biases; needs the package ``wandb``."""

    project: Annotated[str, Field(min_length=1)] = "moefold"
    entity: str | None = None
    group: str | None = None
    mode: Literal["online", "offline"] = "online"

    owner = "moefold.training.hooks.logs:WandbHook"


class Metrics(Record):
    """Where the metrics of each step are written, besides ``metrics.jsonl``."""

    tensorboard: Literal["auto", "on", "off"] = "auto"
    """``auto`` writes events if the package ``tensorboard`` is installed."""
    wandb: Wandb | None = None


class Evaluate(Record):
    """Evaluation on the held-out sets, every ``every`` steps and at the end."""

    every: Size = 100
    tokens: Size | None = None
    """Number of tokens read of each held-out set; None reads all."""
    at_start: bool = False
    """Whether to evaluate before the first step, as is usual in fine-tuning."""
    at_end: Literal["same", "all"] = "same"
    """Whether the evaluation after the last step reads ``tokens`` as well, or all tokens."""
    baselines: tuple[Literal["bigram", "byte_bigram", "byte_trigram", "xz"], ...] = ()
    """Baselines for the result: n-gram tables of tokens or bytes, and ``xz -9e``."""

    owner = "moefold.training.hooks.evaluate:EvaluateHook"

    def rules(self) -> Iterator[Violation]:
        """Each baseline is named once."""
        distinct = tuple(dict.fromkeys(self.baselines))
        if len(distinct) < len(self.baselines):
            rule = "must be distinct"
            yield Violation(("baselines",), list(self.baselines), rule, list(distinct))


class Sample(Record):
    """Text generated during training, in ``samples.txt`` and on the console."""

    every: Size = 100
    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    tokens: Size = 64
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 is greedy decoding."""
    top_p: Share = 0.95

    owner = "moefold.training.hooks.sample:SampleHook"


class Health(Record):
    """Checks of how evenly each layer's experts are used, and the action on collapse."""

    every: Size = 10
    dead_share: Share = 0.5
    """A check fails if at least this share of a layer's experts gets no token."""
    load_ratio: Annotated[float, Field(gt=1)] | None = None
    """A check fails at this ratio of the busiest expert's load to the mean; None: 3/4 of E / K."""
    patience: Size = 5
    """Number of consecutive failed checks that raise the alarm."""
    action: Literal["warn", "checkpoint", "stop"] = "warn"
    """``checkpoint`` saves and continues; ``stop`` saves and ends the run with exit status 3."""

    owner = "moefold.training.hooks.alarms:HealthHook"


class Profile(Record):
    """Chrome traces of chosen steps and what bounds them, in ``profile/``."""

    steps: Annotated[tuple[Size, ...], Field(min_length=1)]

    def rules(self) -> Iterator[Violation]:
        """Steps are strictly increasing."""
        increasing = sorted(set(self.steps))
        if increasing != list(self.steps):
            yield Violation(("steps",), list(self.steps), "must be strictly increasing", increasing)


class Pace(Record):
    """Warns of stragglers: ranks that the others wait for."""

    every: Size = 20
    ratio: Annotated[float, Field(gt=1)] = 1.5
    """A rank is slow if its busy time exceeds the median rank's by this factor."""
    patience: Size = 3
    """Number of consecutive checks at which a rank must be slow."""

    owner = "moefold.training.hooks.alarms:PaceHook"


class Spikes(Record):
    """Logs steps whose gradient norm is far above the recent median, with their documents."""

    ratio: Annotated[float, Field(gt=1)] = 10.0
    """A spike is a gradient norm above the median by this factor."""
    of: Annotated[int, Field(ge=8, le=1000)] = 50
    """Number of steps of the median."""

    owner = "moefold.training.hooks.alarms:SpikesHook"


class Plots(Record):
    """Plots of the run: ``loss.png`` and ``expert_load.png``."""

    every: Size = 200
    """Steps between plots; the end of the run is always plotted."""

    owner = "moefold.training.hooks.plots:PlotsHook"


class ExpertsPage(Record):
    """``experts.html``: held-out text, each token coloured by the expert that took it."""

    tokens: Annotated[int, Field(ge=16, le=8192)] = 1024

    owner = "moefold.training.hooks.experts:ExpertsPageHook"


class Watch(Record):
    """What is logged, evaluated and saved of a run."""

    progress: ProgressDisplay = ProgressDisplay()
    metrics: Metrics = Metrics()
    evaluate: Evaluate | None = Evaluate()
    sample: Sample | None = None
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    health: Health | None = Health()
    pace: Pace | None = Pace()
    spikes: Spikes | None = Spikes()
    profile: Profile | None = None
    plots: Plots | None = Plots()
    experts_page: ExpertsPage | None = ExpertsPage()
    time_out_s: Positive = 300.0
    """Time-out of communication between ranks, in seconds."""
    survive: Survive | None = None
    """Restart of all ranks of one launcher from memory after a loss; None ends the run."""
    hooks: tuple[Annotated[Record, HOOKS], ...] = ()
    """Hooks from outside the package, which files under ``uses`` register."""
