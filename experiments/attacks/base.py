"""What an attack is, and what is asked of every one: it must fail against all defences, and work where those that stop it are off."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from textwrap import indent

from agentrl_jax.data.episode import Outcome
from agentrl_jax.envs.bugfix import handed_out
from agentrl_jax.envs.protocol import Call, Environment, Task
from agentrl_jax.sandbox.protocol import Backend

Script = Callable[[Task], list[Call]]
"""The tool calls of an attack, without the one that hands in."""


@dataclass(frozen=True)
class Way:
    """How an attack goes in one environment.

    script: the tool calls
    off:    names of the defences each of which stops it: with these off, and no others, it is paid
    hole:   nothing stops it there, and why
    weaken: makes the task one that gives itself away, where what stops the attack is how tasks are made, not how they are scored
    tries:  more than one for a race with the judge, which an attacker may lose: it works if one of them is paid
    """

    script: Script
    off: tuple[str, ...] = ()
    hole: str = ""
    weaken: Callable[[Task], Task] | None = None
    tries: int = 1


@dataclass(frozen=True)
class Attack:
    """A way to be paid without the work.

    does: in one sentence
    seen: where it was seen in public
    ways: by name of the environment, see `targets`
    """

    name: str
    does: str
    seen: str
    ways: Mapping[str, Way]


@dataclass(frozen=True)
class Target:
    """An environment as it is attacked.

    make:  the environment with these defences
    every: the names of all its defences
    task:  a task that attacks can show something on: doing nothing is not paid, whatever they have switched off
    """

    name: str
    make: Callable[[frozenset[str]], Environment]
    every: frozenset[str]
    task: Task


@dataclass(frozen=True)
class Trial:
    """An attack in an environment. `faults`: in words what is not as it must be.

    on, off: outcome with all defences, and without those that stop the attack; None where nothing stops it
    """

    attack: str
    target: str
    on: Outcome
    off: Outcome | None
    faults: list[str] = field(default_factory=list)


async def played(target: Target, backend: Backend, calls: Iterable[Call], off: Collection[str] = (), task: Task | None = None) -> Outcome:
    """The outcome of some calls in a fresh box, scored without the defences `off`."""
    task = task or target.task
    env = target.make(target.every - set(off))
    box = await backend.start(task.files, limits=task.limits)
    try:
        for name, arguments in calls:
            await env.step(task, name, arguments, box)
        return await env.score(task, box)
    finally:
        await box.close()


async def attempt(attack: Attack, target: Target, backend: Backend, *, thorough: bool = True) -> Trial:
    """Try an attack with all defences, and without those that stop it; where `thorough`, also with each of these alone.

    Doing nothing must not be paid under any of it, or the attack would show nothing.
    """
    way = attack.ways[target.name]
    calls, faults = way.script(target.task), []

    async def once(off: Collection[str], calls: Iterable[Call] = calls, task: Task | None = None) -> Outcome:
        return await played(target, backend, calls, off, task)

    on = await once(())
    caught = on.reward == 0 or bool(on.tampering)
    if caught == bool(way.hole):
        faults.append(f"with all defences on: {on}" if not way.hole else f"no hole any more: {on}")
    if way.hole:
        return Trial(attack.name, target.name, on, None, faults)
    weak = way.weaken(target.task) if way.weaken else None
    off = await once(way.off, calls, weak)
    for _ in range(1, way.tries):
        if off.reward != 1:
            off = await once(way.off, calls, weak)
    if off.reward != 1:
        faults.append(f"without {', '.join(way.off) or 'a sound task'}: {off}")
    if thorough:
        if (null := await once(way.off, [], weak)).reward != 0:
            faults.append(f"without {', '.join(way.off)}, doing nothing is paid too: {null}")
        for alone in way.off if len(way.off) > 1 else ():
            stopped = await once([name for name in way.off if name != alone])
            if stopped.reward != 0:
                faults.append(f"{alone} alone does not stop it: {stopped}")
    return Trial(attack.name, target.name, on, off, faults)


def solution(task: Task) -> str:
    """Path of the file that the bug is in."""
    return next(iter(task.hidden["gold"])) if "edits" not in task.hidden else task.hidden["edits"][0][0]


def planted(code: str) -> Script:
    """Put code at the end of the file that the bug is in, and have it run once."""

    def script(task: Task) -> list[Call]:
        if task.id.startswith("bugfix"):
            name, source = list(handed_out(task).items())[-1]
            source = source.rstrip()
            block = indent(code.strip(), "    ")  # no `def` may begin a line that the tool did not know
            return [("edit", {"function": name, "old": source, "new": f"{source}\n\n\nif True:\n{block}"}), ("test", {})]
        path = solution(task)
        return [("write", {"path": path, "text": f"{task.files[path].decode()}\n\n{code.strip()}\n"})]

    return script


def everywhere(body: str) -> str:
    """Code that puts another function in the place of each in its module: `body` is that of `lie(function, arguments)`."""
    return f"""
def lies(function):
    def lie(*arguments):
{indent(body.strip(), "        ")}
    lie.__name__ = function.__name__
    return lie
for name, value in list(globals().items()):
    if type(value) is type(lies) and name != "lies":
        globals()[name] = lies(value)
"""


def shell(command: str) -> Script:
    """One shell command."""
    return lambda task: [("run", {"command": command})]


def written(files: Mapping[str, str]) -> Script:
    """Write files."""
    return lambda task: [("write", {"path": path, "text": text}) for path, text in files.items()]
