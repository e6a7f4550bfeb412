"""Records of what is seen of a run: none of them changes what is computed."""

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
    """What the console shows while the run goes on."""

    style: Literal["auto", "bar", "lines", "off"] = "auto"
    """``auto`` is a live bar on a terminal and plain lines elsewhere."""
    seconds: Positive = 5.0
    """Plain lines come at most this often."""

    owner = "moefold.training.hooks.progress:ProgressHook"


class Wandb(Record):
    """Sends the metrics to Weights & Biases; needs the package ``wandb``."""

    project: Annotated[str, Field(min_length=1)] = "moefold"
    entity: str | None = None
    group: str | None = None
    mode: Literal["online", "offline"] = "online"

    owner = "moefold.training.hooks.logs:WandbHook"


class Metrics(Record):
    """Where the figures of each step go; ``metrics.jsonl`` is always written."""

    tensorboard: Literal["auto", "on", "off"] = "auto"
    """``auto`` writes events where the package ``tensorboard`` is installed."""
    wandb: Wandb | None = None


class Evaluate(Record):
    """Evaluation on the held-out sets, every so many steps and at the end."""

    every: Size = 100
    tokens: Size | None = None
    """Held-out tokens of each set that are read; None is all of them."""
    at_start: bool = False
    """Whether to evaluate before the first step, as for a model that is fine-tuned."""
    at_end: Literal["same", "all"] = "same"
    """Whether the evaluation after the run's last step reads ``tokens`` too, or all there are."""
    baselines: tuple[Literal["bigram", "byte_bigram", "byte_trigram", "xz"], ...] = ()
    """What the result is compared with: n-gram tables of tokens or bytes, and ``xz -9e``."""

    owner = "moefold.training.hooks.evaluate:EvaluateHook"

    def rules(self) -> Iterator[Violation]:
        """Each baseline is named once."""
        kept = tuple(dict.fromkeys(self.baselines))
        if len(kept) < len(self.baselines):
            yield Violation(("baselines",), list(self.baselines), "each may stand once", list(kept))


class Sample(Record):
    """Text written by the model while it learns: ``samples.txt`` and the console."""

    every: Size = 100
    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    tokens: Size = 64
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 takes the likeliest token each time."""
    top_p: Share = 0.95

    owner = "moefold.training.hooks.sample:SampleHook"


class Health(Record):
    """How evenly each layer's experts are used, and what happens when that breaks down."""

    every: Size = 10
    dead_share: Share = 0.5
    """Alarm when at least this share of a layer's experts gets no token."""
    load_ratio: Annotated[float, Field(gt=1)] | None = None
    """Alarm at this load of the busiest expert over the mean; None is 3/4 of the worst, E / K."""
    patience: Size = 5
    """Checks in a row that have to fail before the alarm is raised."""
    action: Literal["warn", "checkpoint", "stop"] = "warn"
    """``checkpoint`` saves and goes on; ``stop`` saves and ends the run with status 3."""

    owner = "moefold.training.hooks.alarms:HealthHook"


class Profile(Record):
    """Chrome traces of chosen steps, in ``profile/``."""

    steps: Annotated[tuple[Size, ...], Field(min_length=1)]

    def rules(self) -> Iterator[Violation]:
        """Steps rise and none is named twice."""
        kept = sorted(set(self.steps))
        if kept != list(self.steps):
            yield Violation(("steps",), list(self.steps), "must rise, each named once", kept)


class Pace(Record):
    """Warns of a rank that holds the others up."""

    every: Size = 20
    ratio: Annotated[float, Field(gt=1)] = 1.5
    """A rank is slow if it is busy this many times as long as the median rank."""
    patience: Size = 3
    """Checks in a row at which a rank has to be slow."""

    owner = "moefold.training.hooks.alarms:PaceHook"


class Spikes(Record):
    """Notes steps whose gradient is far larger than of late, with their data."""

    ratio: Annotated[float, Field(gt=1)] = 10.0
    """A spike is a gradient norm this many times the median."""
    of: Annotated[int, Field(ge=8)] = 50
    """Steps that the median is taken over."""

    owner = "moefold.training.hooks.alarms:SpikesHook"


class Plots(Record):
    """Pictures of the run: ``loss.png`` and ``expert_load.png``."""

    every: Size = 200
    """Steps between drawings; the end is always drawn."""

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
    """Longest wait of any group of ranks for its members."""
    survive: Survive | None = None
    """Restarts all ranks of one launcher from memory when one is lost; None ends the run."""
    hooks: tuple[Annotated[Record, HOOKS], ...] = ()
    """Hooks from outside the package; see ``uses``."""
