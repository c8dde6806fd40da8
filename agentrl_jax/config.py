"""What an experiment file says: one `experiment = Experiment(...)`, made of frozen records whose fields are checked when they are made.

    from functools import partial
    from agentrl_jax import credit, objective
    from agentrl_jax.config import Experiment, Optimizer
    from agentrl_jax.envs.bugfix import BugFix
    from agentrl_jax.envs.expert import expert

    experiment = Experiment(
        name="bugfix_gigpo",
        environment=BugFix(level=1),
        expert=expert,
        advantage=partial(credit.gigpo, omega=1.0),
        loss=objective.ppo,
        optimizer=Optimizer(learning_rate=3e-4),
    )

Plug-ins are functions, passed as arguments. The command line overrides by path: `optimizer.learning_rate=1e-3`,
`advantage=my_rule.py:rule`, `loss.clip_high=0.28` (see `overrides`).
"""

import math
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from agentrl_jax.data.anchors import anchor_groups
from agentrl_jax.envs.protocol import Environment
from agentrl_jax.inference.serving import embedded
from agentrl_jax.kernels.reduce import Reduction
from agentrl_jax.models.decoder import FLOAT32, Compute, ModelConfig
from agentrl_jax.models.lora import PROJECTIONS
from agentrl_jax.overrides import ConfigError, accepts, describe, differences, expected, load_file, override
from agentrl_jax.sandbox.bubblewrap import Bubblewrap

__all__ = [
    "SMALL",
    "Compute",
    "ConfigError",
    "Critic",
    "Evaluate",
    "Experiment",
    "Limits",
    "Lora",
    "Mesh",
    "Optimizer",
    "Rollout",
    "WarmStart",
    "describe",
    "differences",
    "load",
    "override",
]


# 0.35M parameters: learns in minutes on two cores.
SMALL = ModelConfig(vocab_size=512, hidden_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_size=256)


def _check(record: Any, *, positive: tuple[str, ...] = (), not_negative: tuple[str, ...] = (), fraction: tuple[str, ...] = ()) -> None:
    """Types of all fields, then the ranges of those named."""
    prefix = "" if type(record).__name__ == "Experiment" else f"{type(record).__name__.lower()}."
    hints = typing.get_type_hints(type(record))
    for name in (f.name for f in fields(record)):
        value = getattr(record, name)
        _require(accepts(hints[name], value), f"{prefix}{name} must be {expected(hints[name])}, got {value!r}")
        if value is None:
            continue
        # Written so that NaN fails.
        _require(name not in positive or 0 < value < math.inf, f"{prefix}{name} must be above 0 and finite, got {value}")
        _require(name not in not_negative or 0 <= value < math.inf, f"{prefix}{name} must be 0 or more and finite, got {value}")
        _require(name not in fraction or 0 <= value <= 1, f"{prefix}{name} must be between 0 and 1, got {value}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class WarmStart:
    """Supervised updates on a scripted expert's episodes, until the policy succeeds often enough to learn from its own.

    episodes:      expert episodes to imitate
    updates:       updates before the success rate is measured; as many again while it is below the threshold
    rows:          rows of packed episodes per update
    learning_rate: peak; falls to 0 by a cosine, in every round of updates
    warmup:        updates over which it rises from 0
    threshold:     success rate that ends the warm start, 0 to 1
    rounds:        rounds of updates after which the run gives up instead of training a policy that never succeeds
    tasks:         training tasks the success rate is measured on
    named:         also of a policy that the experiment names; without it only one that the run makes is taught
    """

    episodes: int = 1200
    updates: int = 200
    rows: int = 12
    learning_rate: float = 4e-3
    warmup: int = 20
    threshold: float = 0.2
    rounds: int = 4
    tasks: int = 96
    named: bool = False

    def __post_init__(self) -> None:
        _check(
            self,
            positive=("episodes", "updates", "rows", "learning_rate", "rounds", "tasks"),
            not_negative=("warmup",),
            fraction=("threshold",),
        )


@dataclass(frozen=True)
class Rollout:
    """How the episodes of a step are collected.

    groups:         tasks per step
    group_size:     episodes per task
    turns:          actions per episode at most
    turn_tokens:    tokens per action at most
    episode_tokens: sampled tokens per episode at most
    context:        tokens of prompt and completion together
    seconds:        policy and tool time per episode at most; queueing is not charged
    temperature:    sampling temperature, also applied in the trainer
    slots:          episodes that run at the same time
    retries:        how often an episode lost to infrastructure is tried anew
    history:        "sampled": turns see the ids that were sampled; "template": what the chat template makes of them, a new segment
                    where that differs, as servers do that are sent messages
    """

    groups: int = 8
    group_size: int = 8
    turns: int = 12
    turn_tokens: int = 48
    episode_tokens: int = 320
    context: int = 512
    seconds: float = 60.0
    temperature: float = 1.0
    slots: int = 64
    retries: int = 1
    history: Literal["sampled", "template"] = "sampled"

    def __post_init__(self) -> None:
        positive = ("groups", "group_size", "turns", "turn_tokens", "episode_tokens", "context", "seconds", "temperature", "slots")
        _check(self, positive=positive, not_negative=("retries",))
        _require(
            self.turn_tokens < self.context, f"rollout.turn_tokens must be below rollout.context={self.context}, got {self.turn_tokens}"
        )


@dataclass(frozen=True)
class Limits:
    """What becomes of episodes that ran into a limit of their own making.

    handling:         "score": their reward counts like any other; "drop": they leave the loss
    dropped_in_stats: dropped episodes still count in the statistics of their group
    """

    handling: Literal["score", "drop"] = "score"
    dropped_in_stats: bool = False

    def __post_init__(self) -> None:
        _check(self)
        _require(self.handling == "drop" or not self.dropped_in_stats, "limits.dropped_in_stats=true needs limits.handling=drop")


@dataclass(frozen=True)
class Optimizer:
    """AdamW over the minibatches of a step.

    learning_rate: peak
    decay:         "linear", "cosine": falls to 0 over the run; "constant": stays
    warmup:        updates over which it rises from 0
    b1, b2, eps:   of AdamW
    weight_decay:  of AdamW; of matrices alone, see `learner.optimizer.decays`
    clip:          global norm that gradients are cut to
    minibatches:   updates per step, each over a part of its episodes
    accumulate:    pieces that a minibatch is computed in, one after the other, and the rows of a warm start's update; changes memory, not
                   the gradient. CPUs are faster with pieces of a thousand tokens a device
    """

    learning_rate: float = 5e-4
    decay: Literal["linear", "cosine", "constant"] = "linear"
    warmup: int = 0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    minibatches: int = 4
    accumulate: int = 1

    def __post_init__(self) -> None:
        _check(
            self,
            positive=("learning_rate", "eps", "clip", "minibatches", "accumulate"),
            not_negative=("warmup", "weight_decay"),
            fraction=("b1", "b2"),
        )


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (`models.lora`) are trained, and the policy's own weights stay. Good learning rates are about ten times higher.

    rank:        columns of A, rows of B
    alpha:       A B is scaled by alpha / rank
    projections: the matrices that get one, in every layer
    """

    rank: int = 16
    alpha: float = 32.0
    projections: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        _check(self, positive=("rank", "alpha"))
        wrong = [name for name in self.projections if name not in PROJECTIONS]
        _require(
            bool(self.projections) and not wrong,
            f"lora.projections must be one or more of {', '.join(PROJECTIONS)}, got {', '.join(wrong) or 'none'}",
        )


@dataclass(frozen=True)
class Mesh:
    """How all devices of the learner are arranged (docs/scaling.md); the product of the sizes is their number.

    data:     parts of a batch's rows, each with a copy of the weights; None: what the others leave
    fsdp:     parts of the rows, which share one copy of weights and moments
    tensor:   parts of every matrix, and of the heads
    sequence: parts of the tokens of a row
    """

    data: int | None = None
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        _check(self, positive=("fsdp", "tensor", "sequence"))
        _require(self.data is None or self.data > 0, f"mesh.data must be above 0, or none for what the others leave, got {self.data}")


@dataclass(frozen=True)
class Critic:
    """A value head (`models.heads`), trained in the minibatches of the policy, for credit rules that need values.

    Its optimizer is that of the policy, but for the learning rate.

    trunk:         "separate": a decoder of its own, from the policy's first weights (with `lora` an adapter of its own); "shared": the
                   policy's, so that value and policy are trained into the same weights
    learning_rate: peak; of the head alone where the trunk is shared
    coefficient:   share of the value loss's gradient that reaches a shared trunk; 0: the head reads states that only the policy makes
    clip:          half width of the interval around the values before the step that the loss holds values in; None: not held
    huber:         error from which the loss grows linearly; None: squared everywhere
    warmup:        updates of the critic before the policy begins to move
    """

    trunk: Literal["separate", "shared"] = "separate"
    learning_rate: float = 1e-3
    coefficient: float = 0.1
    clip: float | None = None
    huber: float | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        _check(self, positive=("learning_rate", "clip", "huber"), not_negative=("coefficient", "warmup"))


@dataclass(frozen=True)
class Evaluate:
    """Evaluation on tasks that are never trained on: one episode each.

    every:  steps between evaluations at the sampling temperature
    tasks:  held-out tasks of such an evaluation
    final:  tasks of each split before and after the run, sampled and greedy
    splits: of the environment, measured before and after
    """

    every: int = 10
    tasks: int = 64
    final: int = 100
    splits: tuple[str, ...] = ("held_out",)

    def __post_init__(self) -> None:
        _check(self, positive=("every", "tasks", "final"))


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A whole run. Its results are in `root`/`name`.

    name:        of the run folder
    environment: tasks, tools and verifier
    expert:      script that the warm start imitates: `(environment, task, random) -> tool calls`
    advantage:   `AdvantageFn`: which tokens the reward is credited to
    loss:        `LossFn`: what is minimised
    reduction:   which tokens, episodes or groups count the same in the loss, see `kernels.reduce`
    horizon:     tokens that reduction "constant" divides by
    correction:  `CorrectionFn`: what is done about tokens that other weights sampled
    compute:     `models.decoder.Compute`: type that the trainer's matmuls are in, and whether layers are computed again for the gradient
    mesh:        how the learner's devices share rows, weights and moments
    reference:   "held": the loss is given log-probs of the policy that the run started from; "offloaded": and its weights wait on the host
    critic:      estimates the values that rules of `credit.critic` need; None: no values
    lora:        trains adapters of the policy's weights instead of them; None: all weights
    rewrite:     `(Batch, log-probs under the collecting weights) -> Batch`, before credit, see `selection`
    components:  named parts of the reward that credit rules are given
    anchors:     `AnchorFn`: which turns started in the same state, for GiGPO; equal keys of the environment if left out
    policy:      folder, or name on the Hugging Face hub, of the model to start from; None: a small one is made and warm-started
    seed:        every random choice of the run derives from it
    steps:       training steps
    row_length:  tokens of a training row; several episodes are packed into one
    turn_reward: `TurnRewardFn`: scores single turns; None where only the outcome counts
    inference:   `(policy, *, context_limit, slots) -> Serving`: what episodes sample from, see `inference.serving`
    sandbox:     makes the backend that starts boxes
    checkpoint_every: steps between checkpoints
    root:        folder of runs
    """

    name: str
    environment: Environment
    expert: Callable[..., Any]
    advantage: Callable[..., Any]
    loss: Callable[..., Any]
    reduction: Reduction = "token"
    horizon: int | None = None
    correction: Callable[..., Any] | None = None
    compute: Compute = FLOAT32
    mesh: Mesh = Mesh()
    reference: Literal["none", "held", "offloaded"] = "none"
    critic: Critic | None = None
    lora: Lora | None = None
    rewrite: Callable[..., Any] | None = None
    components: tuple[str, ...] = ()
    anchors: Callable[..., Any] = anchor_groups
    policy: str | None = None
    seed: int = 0
    steps: int = 40
    row_length: int = 512
    model: ModelConfig = SMALL
    warmstart: WarmStart = WarmStart()
    rollout: Rollout = Rollout()
    limits: Limits = Limits()
    optimizer: Optimizer = Optimizer()
    evaluate: Evaluate = Evaluate()
    turn_reward: Callable[..., Any] | None = None
    inference: Callable[..., Any] = embedded
    sandbox: Callable[..., Any] = Bubblewrap
    checkpoint_every: int = 10
    root: str = "runs"

    def __post_init__(self) -> None:
        _check(self, positive=("steps", "row_length", "checkpoint_every"), not_negative=("seed",))
        _check(self.compute)
        _require(
            self.rollout.context <= self.row_length,
            f"rollout.context={self.rollout.context} must not exceed row_length={self.row_length}: an episode is never split over rows",
        )
        _require(
            (self.horizon is None) == (self.reduction != "constant"),
            f"horizon goes with reduction=constant, which needs it: a constant number of tokens, got horizon={self.horizon}",
        )
        _require(
            re.fullmatch(r"\w[\w.-]*", self.name) is not None,
            f"name must be a folder name of letters, digits, '_', '-' and '.', got {self.name!r}",
        )
        model = self.model
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            _require(getattr(model, name) > 0, f"model.{name} must be above 0, got {getattr(model, name)}")
        _require(
            model.num_heads % model.num_kv_heads == 0,
            f"model.num_heads={model.num_heads} must be a multiple of model.num_kv_heads={model.num_kv_heads}",
        )
        _require(model.head_dim % 2 == 0, f"model.head_dim must be even (RoPE turns pairs), got {model.head_dim}")
        episodes = self.rollout.groups * self.rollout.group_size
        _require(
            self.optimizer.minibatches <= episodes,
            f"optimizer.minibatches={self.optimizer.minibatches} must not exceed rollout.groups x rollout.group_size = {episodes} episodes",
        )
        _require(
            self.critic is None or self.critic.warmup < self.updates,
            f"critic.warmup must be below steps x optimizer.minibatches = {self.updates} updates, or the policy never moves",
        )

    @property
    def updates(self) -> int:
        """Of the whole run."""
        return self.steps * self.optimizer.minibatches

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.root) / self.name


def load(path: str | Path) -> Experiment:
    """The `experiment` of an experiment file. Raises ConfigError with file, line and cause."""
    module = load_file(Path(path))
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, Experiment):
        found = "there is none" if experiment is None else f"it is a {type(experiment).__name__}"
        raise ConfigError(f"{path}: must define `experiment = Experiment(...)`; {found}")
    return experiment
