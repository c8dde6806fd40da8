"""Python packages for a sandbox's root: the installed distributions that some names need, and their files.

They come from the running interpreter's own environment, so a box has the very versions that the host has, and needs no network.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from agentrl_jax.sandbox.protocol import SandboxError


def resolve(packages: Sequence[str]) -> dict[str, Distribution]:
    """The distributions by name, sorted, with all that they require here, as "pandas" or "pandas[sql] >= 3".

    Raises SandboxError for what is not installed, or not as files that can be copied.
    """
    try:
        wanted = [(Requirement(package), "") for package in packages]
    except InvalidRequirement as error:
        raise SandboxError(f"packages={tuple(packages)!r}: {error}") from None
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    while wanted:
        requirement, whose = wanted.pop()
        name = canonicalize_name(requirement.name)
        found[name] = found.get(name) or _installed(requirement, whose)
        if not requirement.specifier.contains(found[name].version, prereleases=True):
            raise SandboxError(
                f"the sandbox's root needs {requirement}{whose}, and {found[name].version} is installed: {_remedy(requirement)}"
            )
        for extra in {"", *requirement.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            required = map(Requirement, found[name].requires or ())
            wanted += [(r, f" (of {name})") for r in required if r.marker is None or r.marker.evaluate({"extra": extra})]
    return dict(sorted(found.items()))


def pins(distributions: Mapping[str, Distribution]) -> list[str]:
    """The versions as pip reads them."""
    return [f"{name}=={each.version}" for name, each in distributions.items()]


def copy(distributions: Mapping[str, Distribution], target: Path) -> None:
    """Their files to the folder `target`. Programs, which would lie outside of it, and folders of tests stay behind."""
    for each in distributions.values():
        for path in each.files or ():
            if path.is_absolute() or ".." in path.parts or "tests" in path.parts[:-1]:
                continue
            source = Path(str(path.locate()))
            if source.is_file():  # pip lists compiled files that may be gone
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target / path)


def _installed(requirement: Requirement, whose: str) -> Distribution:
    try:
        found = distribution(requirement.name)
    except PackageNotFoundError:
        raise SandboxError(f"the sandbox's root needs {requirement}{whose}, which is not installed: {_remedy(requirement)}") from None
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if not found.files or origin.get("dir_info", {}).get("editable"):
        raise SandboxError(
            f"the files of {requirement.name}{whose} are not in site-packages, so a root cannot have them: {_remedy(requirement)}"
        )
    return found


def _remedy(requirement: Requirement) -> str:
    return f"`pip install '{str(requirement).partition(';')[0].strip()}'`"
