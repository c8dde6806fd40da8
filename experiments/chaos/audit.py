"""What must hold of episodes, whatever failed beneath them, and the line of a table that says so."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_jax.data.episode import Episode
from agentrl_jax.data.store import read, unfinished
from agentrl_jax.rollout.agent import Job

HEADER = f"{'fault':44} {'times':>5} {'episodes':>8} {'retried':>7} {'excluded':>8} {'longest':>8}  outcome"


class AuditError(AssertionError):
    """Something that must hold under every fault did not."""


def require(holds: object, what: str) -> None:
    """Raise AuditError, saying `what` had to hold, if it does not."""
    if not holds:
        raise AuditError(what)


@dataclass
class Row:
    """A fault, how often it was made, and what became of the episodes around it; all of them audited.

    retried:  attempts that infrastructure spoilt and that were made again
    excluded: episodes without a score after their last attempt
    longest:  seconds of the slowest of what had to end by a deadline
    outcome:  what was seen, in a few words
    """

    fault: str
    times: int = 0
    episodes: int = 0
    retried: int = 0
    excluded: int = 0
    longest: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def within(self, deadline: float, what: str) -> Iterator[None]:
        """What is done inside ends by its deadline, in seconds."""
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        self.longest = max(self.longest, took)
        require(took <= deadline, f"{what} took {took:.1f} s, its deadline is {deadline:g} s")

    def count(self, jobs: Sequence[Job], episodes: Sequence[Episode], store: Path) -> None:
        """Audit what `collect` returned for the jobs, and what it wrote into the store meanwhile.

        Every job has one episode, no attempt is stored twice or left open, what infrastructure ended has no score, and all else has one.
        """
        stored = list(read(store))
        ids = [episode.id for episode in stored]
        require(len(ids) == len(set(ids)), "no episode is counted twice")
        require(not unfinished(store), "no episode is left unfinished")
        require([e.id.partition("~")[0] for e in episodes] == [job.key for job in jobs], "every job has one episode, in order")
        attempts = Counter(episode.id.partition("~")[0] for episode in stored)
        require(set(attempts) >= {job.key for job in jobs}, "no episode is lost")
        for episode in stored:
            require(
                (episode.outcome is None) == episode.ending.infrastructure,
                f"{episode.id} ended by {episode.ending.value} with outcome {episode.outcome}: what infrastructure spoils is never scored",
            )
        self.episodes += len(jobs)
        self.retried += sum(attempts[job.key] - 1 for job in jobs)
        self.excluded += sum(episode.outcome is None for episode in episodes)
        self.seen.update(episode.ending.value for episode in stored)

    def __str__(self) -> str:
        seen = ", ".join(f"{n} {what}" for what, n in self.seen.most_common())
        return f"{self.fault:44} {self.times:5} {self.episodes:8} {self.retried:7} {self.excluded:8} {self.longest:6.1f} s  {seen}"
