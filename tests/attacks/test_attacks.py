"""Every attack fails against all defences, and works without those that stop it; probes fail; honest work is paid and not flagged.

`make attacks` does the same with each defence alone, with more gold solutions, and in containers.
"""

from collections.abc import AsyncIterator

import pytest

from agentrl_jax.envs.defences import touched
from agentrl_jax.sandbox.bubblewrap import Bubblewrap
from agentrl_jax.sandbox.docker import Docker
from agentrl_jax.sandbox.protocol import Backend
from experiments.attacks import answering, leaving, lying, planting
from experiments.attacks.__main__ import ATTACKS, PACKAGES, false_alarms, line, probed
from experiments.attacks.base import Attack, Target, Way, attempt
from experiments.attacks.probes import PROBES
from experiments.attacks.targets import targets

bwrap, docker = pytest.mark.real("bwrap"), pytest.mark.real("docker")
FAST = ("bugfix", "repository", "data", "data names", "search", "harbor", "terminal", "terminal removal")
SAMPLE = (*("os._exit(0)", "equal to everything", "patched verdict", "conftest.py", "edit the tests", "background process", "git history"),
          *("an empty file", "special cases", "every number"))  # fmt: skip


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {target.name: target for target in targets(tmp_path_factory.mktemp("targets"))}


@pytest.fixture
async def boxes() -> AsyncIterator[Backend]:
    async with Bubblewrap(packages=("pytest",)) as backend:
        yield backend


@pytest.fixture
async def containers() -> AsyncIterator[Backend]:
    async with Docker(packages=PACKAGES) as backend:
        yield backend


def named(name: str) -> Attack:
    return next(attack for attack in ATTACKS if attack.name == name)


def test_attacks_are_many_documented_and_named_once() -> None:
    shown = [attack for attack in ATTACKS if any(not way.hole for way in attack.ways.values())]
    assert len(shown) >= 25
    assert len({attack.name for attack in ATTACKS} | {probe.name for probe in PROBES}) >= len(ATTACKS) + len(PROBES) - 1
    assert all(attack.does and attack.seen and attack.ways for attack in ATTACKS)
    assert {attack.name for family in (leaving, lying, planting, answering) for attack in family.ATTACKS} == {a.name for a in ATTACKS}


def test_every_defence_stops_something(attacked: dict[str, Target]) -> None:
    for target in attacked.values():
        kind = target.name.split()[0]
        stopping = {name for a in ATTACKS for way, how in a.ways.items() if way.split()[0] == kind for name in how.off}
        assert stopping <= target.every
        if kind != "bugfix":  # "paths" makes no difference to it
            assert kind in ("repository", "swe") or stopping == target.every, (kind, target.every - stopping)


@bwrap
@pytest.mark.parametrize("name", [attack.name for attack in ATTACKS if set(attack.ways) & set(FAST)])
async def test_attacks(name: str, attacked: dict[str, Target], boxes: Backend) -> None:
    for target in set(named(name).ways) & set(FAST):
        trial = await attempt(named(name), attacked[target], boxes, thorough=False)
        assert trial.faults == []


@bwrap
@pytest.mark.slow
@pytest.mark.parametrize("name", ["equal to everything", "conftest.py", "results found by the collector", "git history"])
async def test_attacks_on_loaded_tasks(name: str, attacked: dict[str, Target], boxes: Backend) -> None:
    trial = await attempt(named(name), attacked["swe"], boxes, thorough=False)
    assert trial.faults == []


ENDLESS = ("a loop", "a flood of output", "processes without end")  # these are waited for


@bwrap
@pytest.mark.parametrize("probe", [pytest.param(p, marks=[pytest.mark.slow] * (p.name in ENDLESS), id=p.name) for p in PROBES])
async def test_probes(probe, attacked: dict[str, Target], boxes: Backend) -> None:
    for target in set(probe.scripts) & set(FAST):
        assert await probed(probe, attacked[target], boxes) is None


@bwrap
@pytest.mark.slow
async def test_no_false_alarms(attacked: dict[str, Target]) -> None:
    async with Bubblewrap(packages=PACKAGES) as backend:
        assert await false_alarms(backend, 40, [attacked["swe"], attacked["harbor"]]) == []


def test_what_python_has_compiled_is_no_tampering_where_python_puts_it() -> None:
    found = [(path, "new") for path in ("kit/__pycache__/core.cpython-311.pyc", "kit/core.pyc", "__pycache__/conftest.py")]
    assert touched(repr(found), {"kit/core.py": b""}, lambda path: False) == ("kit/core.pyc", "__pycache__/conftest.py")


@docker
@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
async def test_a_sample_in_containers(name: str, attacked: dict[str, Target], containers: Backend) -> None:
    attack = named(name)
    trial = await attempt(attack, attacked[next(iter(attack.ways))], containers, thorough=False)
    assert trial.faults == []


@bwrap
async def test_what_the_suite_asks_can_fail(attacked: dict[str, Target], boxes: Backend) -> None:
    target = attacked["repository"]

    async def faults(way: Way) -> list[str]:
        attack = Attack("a", "b", "c", {"repository": way})
        trial = await attempt(attack, target, boxes)
        assert all(f"WRONG {fault}" in line(trial, attack, "bubblewrap") for fault in trial.faults)
        return [fault.partition(":")[0] for fault in trial.faults]

    def gold(task):
        return make.gold(task)[:-1]

    make = target.make(target.every)
    assert await faults(Way(gold, ("report",))) == ["with all defences on"], "what is paid gets through"
    assert await faults(Way(lambda task: [], ("report",))) == ["without report"], "what does nothing is no attack"
    assert await faults(Way(lambda task: [], ("hidden",))) == ["without hidden, doing nothing is paid too"]
    leave = leaving.ATTACKS[0].ways["repository"].script
    assert await faults(Way(leave, ("paths", "report"))) == ["paths alone does not stop it"]
    assert await faults(Way(leave, hole="it is none")) == ["no hole any more"]
