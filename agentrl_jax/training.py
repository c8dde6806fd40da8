"""What a run trains, and how several processes train it: one leads and collects the episodes (`train`), the others follow it."""

import signal
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import jax
import msgpack

from agentrl_jax.config import ConfigError, Experiment
from agentrl_jax.data.collate import Shape
from agentrl_jax.data.episode import Episode
from agentrl_jax.data.events import Packed, events_of, fold
from agentrl_jax.learner.checkpoint import Checkpoints
from agentrl_jax.learner.reference import reference_of
from agentrl_jax.models.decoder import Params
from agentrl_jax.models.distributed import broadcast, leads, local
from agentrl_jax.models.lora import whole
from agentrl_jax.models.policy import Policy
from agentrl_jax.models.sharding import sharding_of
from agentrl_jax.prepare import WARM, ready_policy
from agentrl_jax.report.progress import library_chatter_to
from agentrl_jax.step import CreditOf, first_shape, learn, learner_of, mesh_of, trained_of


class Training:
    """Learner, state and checkpoints of a run, from where its folder stands. Used within `with`.

    step: steps of learning done

    Every process has one, and all do the same with it at the same time: each method of the leader's tells the others to call theirs.
    """

    def __init__(self, experiment: Experiment, policy: Policy) -> None:
        _tell("begin")
        self._experiment = experiment
        self._learner = learner_of(experiment, policy.model)
        self._base = self._learner.place(policy.params) if experiment.lora else None
        self._reference = reference_of(self._learner, policy.params, experiment.reference, self._base)
        self._state, self.step, self._shape = self._learner.init(trained_of(experiment, policy.params)), 0, first_shape(experiment)
        self._checkpoints = Checkpoints(experiment.folder / "checkpoints")
        if self._checkpoints.latest is not None:
            self.step, self._state, meta = self._checkpoints.restore(self._state)
            self._shape = Shape(*meta["shape"])

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._checkpoints.__exit__(kind, error, trace)

    @property
    def intact(self) -> bool:
        """Whether there is a state to save: a step that failed may have used up its buffers."""
        return not self._state.updates.is_deleted()

    def weights(self) -> Params:
        """The present weights of the policy, for whoever samples from them or writes them; their buffers go with the next step."""
        _tell("weights")
        return local(whole(self._state.params, self._base))

    def learn(self, episodes: Sequence[Episode]) -> tuple[dict[str, float], CreditOf]:
        """One step of learning: its metrics, and the credit of every token."""
        _tell("learn", episodes)
        self._state, self._shape, values, credit = learn(
            self._experiment, self._learner, self._state, self._base, self._reference, episodes, self.step, self._shape
        )
        self.step += 1
        return values, credit

    def save(self) -> None:
        """Write a checkpoint."""
        _tell("save")
        self._checkpoints.save(self.step, self._state, {"shape": list(self._shape)})

    def follow(self) -> None:
        """Do what the leader does, until it is done."""
        while told := broadcast():
            match msgpack.unpackb(told):
                case ["weights", _]:
                    self.weights()
                case ["learn", episodes]:
                    self.learn([_episode(packed) for packed in episodes])
                case ["save", _]:
                    self.save()
                case other:
                    raise AssertionError(f"the leader speaks of {other}")


def _tell(what: str, episodes: Sequence[Episode] = ()) -> None:
    if leads() and jax.process_count() > 1:
        packed = [Packed.of(episode.id, 0, events_of(episode)).to_bytes() for episode in episodes]
        broadcast(msgpack.packb([what, packed]) or b"")


def _episode(packed: bytes) -> Episode:
    episode: Any = fold(Packed.from_bytes(packed).unpack())
    return episode


def follow(experiment: Experiment) -> None:
    """The part of a process that does not lead. It reads the policy and writes its share of the checkpoints in the folder of the run.

    Raises ConfigError where the policy is not in that folder.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the leader says when it is over
    try:
        if not broadcast():
            return
        with library_chatter_to(experiment.folder / f"train.{jax.process_index()}.log"):
            policy = ready_policy(experiment, experiment.folder, partial(sharding_of, mesh_of(experiment)))
            if policy is None:
                raise ConfigError(
                    f"{experiment.folder / WARM}: not there; all processes of a run need one folder: set root= to a shared one"
                )
            with Training(experiment, policy) as training:
                training.follow()
    except Exception:
        broadcast()  # the leader fails at the same place, and this is its last word
        raise
