"""The floors of the house: a room imports rooms below it only, and the host side runs without jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "agentrl_jax"
FLOORS = [
    ["kernels", "data", "chat", "sandbox", "overrides"],
    ["models", "credit", "correction", "objective", "selection", "envs", "report"],
    ["inference"],
    ["config"],  # names what to sample from and what to run commands in
    ["learner", "presets"],
    ["rollout", "replay"],
    ["runs", "step"],
    ["evaluate"],
    ["prepare"],
    ["training", "serve"],
    ["train"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Everything up to an Episode, and what reads episodes for people.
HOST = ["chat", "sandbox", "envs", "rollout", "report"]

FILES = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {path: parts for path, parts in FILES.items() if (path.parent / "__init__.py").is_file() and parts != ("__init__",)}


def imported_rooms(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("agentrl_jax.")} & set(FLOOR)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: "/".join(MODULES[path]))
def test_a_room_imports_only_rooms_below_it(path):
    room = MODULES[path][0]
    wrong = {other for other in imported_rooms(path) - {room} if FLOOR[other] >= FLOOR[room]}
    assert not wrong, f"{room} is on floor {FLOOR[room] + 1}; it may not import {wrong}"


def test_the_host_side_runs_without_jax():
    host = [".".join(("agentrl_jax", *parts)).removesuffix(".__init__") for parts in MODULES.values() if parts[0] in HOST]
    host = [name for name in host if not name.endswith("__main__")] + ["agentrl_jax.data.episode"]
    check = f"import sys, importlib; [importlib.import_module(name) for name in {host}]; sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", check], cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "jax was imported"


def test_files_stay_short():
    long = {str(path.relative_to(PACKAGE)): n for path in FILES if (n := len(path.read_text().splitlines())) > 420}
    assert not long, "a file of more than 400 lines holds two ideas"
