import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from agentrl_jax.data.episode import Ending
from agentrl_jax.data.events import Ended, Start
from agentrl_jax.envs.protocol import Task
from agentrl_jax.inference.protocol import InferenceError
from agentrl_jax.rollout.collector import CollectError, RolloutSettings, collect, plan
from tests.rollout.fakes import LIMITS, SUBMIT, Boxes, Notebook, Turns, add, parts

TASKS = [Task(f"words/{i}", "Write the words.", {}) for i in range(3)]
SETTINGS = RolloutSettings(LIMITS, slots=4)


def test_jobs_are_planned_group_by_group():
    jobs = plan(TASKS, 2, seed=5, step=7)
    assert [job.key for job in jobs] == [f"train-7-{g}-{m}" for g in range(3) for m in range(2)]
    assert [job.group for job in jobs] == [f"train-7-{g}" for g in range(3) for _ in range(2)]
    assert [job.task.id for job in jobs] == [f"words/{g}" for g in range(3) for _ in range(2)]
    assert jobs == plan(TASKS, 2, seed=5, step=7)


def test_seeds_differ_by_run_phase_step_group_and_member():
    plans = [plan(TASKS, 2, seed=s, step=t, phase=p) for s in (0, 1) for t in (0, 1) for p in ("train", "eval")]
    assert len({job.seed for jobs in plans for job in jobs}) == 8 * 6
    assert [job.seed for job in plan(TASKS[:1], 1, seed=0, step=0)] == [job.seed for job in plan(TASKS, 2, seed=0, step=0)][:1]


async def test_episodes_come_in_the_order_of_the_jobs_whatever_ends_first():
    class Uneven(Turns):
        async def generate(self, prompt, sampling, *, session):
            await asyncio.sleep(0.002 * (ord(session[-1]) * 7 % 5))
            return await super().generate(prompt, sampling, session=session)

    jobs = plan(TASKS, 4, seed=0, step=0)
    seen, backend = [], Boxes()
    sampler = Uneven([add("a"), SUBMIT])
    episodes = await collect(jobs, parts(sampler=sampler, backend=backend), SETTINGS, progress=lambda *p: seen.append(p))
    assert [e.id for e in episodes] == [job.key for job in jobs]
    assert [e.seed for e in episodes] == [job.seed for job in jobs]
    assert [done for done, _, _ in seen] == list(range(1, 13))
    assert seen[-1] == (12, 12, sum(e.policy_tokens for e in episodes))
    assert backend.most <= 4
    assert not backend.open
    assert all(e.timings["queue"] >= 0 for e in episodes)


async def test_temperature_reaches_the_sampler():
    sampler = Turns([SUBMIT])
    (episode,) = await collect(plan(TASKS[:1], 1, seed=0, step=0, phase="eval"), parts(sampler=sampler), replace(SETTINGS, temperature=0.0))
    assert sampler.samplings["eval-0-0-0"][0].temperature == 0.0
    assert episode.id == "eval-0-0-0"


async def test_a_spoilt_episode_is_tried_again_with_the_same_seed():
    events, jobs = [], plan(TASKS, 1, seed=0, step=0)
    episodes = await collect(jobs, parts(backend=Boxes("start", spoilt=2)), SETTINGS, sink=events.append)
    assert all(e.usable for e in episodes)
    assert [e.seed for e in episodes] == [job.seed for job in jobs]
    assert sum(e.counters.get("retried_sandbox_failed", 0) for e in episodes) == 2
    started = [e.episode for e in events if isinstance(e, Start)]
    assert sorted(started) == sorted({*started})
    assert len(started) == 5
    ended = Counter(e.ending for e in events if isinstance(e, Ended))
    assert ended == {Ending.SUBMITTED: 3, Ending.SANDBOX_FAILED: 2}


async def test_one_lost_episode_does_not_stop_the_step():
    class Dying(Turns):
        async def generate(self, prompt, sampling, *, session):
            if session == "train-0-1-0":
                raise InferenceError("the engine died")
            return await super().generate(prompt, sampling, session=session)

    settings = replace(SETTINGS, retries=0)
    episodes = await collect(plan(TASKS, 2, seed=0, step=0), parts(sampler=Dying([add("a"), SUBMIT])), settings)
    assert Counter(e.ending for e in episodes) == {Ending.SUBMITTED: 5, Ending.INFERENCE_FAILED: 1}
    assert [e.usable for e in episodes] == [True, True, False, True, True, True]


async def test_too_few_usable_episodes_are_an_error_that_says_why():
    backend = Boxes("start")
    with pytest.raises(CollectError, match=r"only 0 of 3 episodes are usable, .* they ended by: 3 sandbox_failed"):
        await collect(plan(TASKS, 1, seed=0, step=0), parts(backend=backend), SETTINGS)
    assert backend.started == 0


async def test_cancellation_closes_everything():
    backend, events = Boxes(), []
    running = asyncio.create_task(
        collect(plan(TASKS, 2, seed=0, step=0), parts([add("hang")], backend=backend), SETTINGS, sink=events.append)
    )
    while len(backend.open) < 4:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not backend.open
    assert [e.ending for e in events if isinstance(e, Ended)] == [Ending.CANCELLED] * 4


async def test_a_mistake_in_the_code_stops_the_run_and_closes_everything():
    class Faulty(Notebook):
        async def step(self, task, name, arguments, box):
            return await super().step(task, "add", {"word": "bug" if task.id == "words/1" else "hang"}, box)

    backend = Boxes()
    with pytest.raises(ExceptionGroup) as caught:
        await collect(plan(TASKS, 1, seed=0, step=0), parts(backend=backend, environment=Faulty()), SETTINGS)
    assert [type(e) for e in caught.value.exceptions] == [ZeroDivisionError]
    assert not backend.open


@pytest.mark.parametrize("change", [{"slots": 0}, {"retries": -1}, {"min_usable": 1.5}])
def test_impossible_settings_are_refused(change):
    with pytest.raises(ValueError, match=rf"RolloutSettings\.{next(iter(change))} must be"):
        replace(SETTINGS, **change)
