"""How all tests run: strictly, on four fake devices, with a compilation cache, and never quietly without a part they need."""

import asyncio
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of a test's time XLA compiles. `make smoke`, `make golden` and the benchmarks run what the optimising compiler makes.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import hypothesis
import jax
import jaxtyping
import optax

from tests import typecheck

# A shell that starts tests in the background has them ignore Ctrl-C, and so would every process that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

jaxtyping.install_import_hook("agentrl_jax", f"{typecheck.__name__}.check")

# Strict promotion is for our code; optax mixes Python floats with an int32 count.
_standard, _cosine = jax.numpy_dtype_promotion("standard"), optax.cosine_decay_schedule
optax.tree.bias_correction = _standard(optax.tree.bias_correction)
optax.cosine_decay_schedule = lambda *args: _standard(_cosine(*args))

# The first example of a property may compile: time limits on examples would only make tests flaky. CI draws the same ones each time.
_RELAXED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "derandomize": "CI" in os.environ}
hypothesis.settings.register_profile("default", max_examples=50, **_RELAXED)
hypothesis.settings.register_profile("fast", max_examples=15, **_RELAXED)
hypothesis.settings.load_profile("default")


VLLM_VENV = Path(os.environ.get("AGENTRL_VLLM_VENV", Path(__file__).parent.parent / ".venv-vllm")).absolute()


@pytest.fixture(autouse=True, scope="module")
def _programs_of_a_module():
    """Thousands of compiled programs at once exhaust the memory maps that a process may have, and XLA then crashes."""
    yield
    jax.clear_caches()


def _bwrap() -> str | None:
    from agentrl_jax.sandbox import bubblewrap

    try:
        asyncio.run(bubblewrap.preflight())
    except Exception as error:  # noqa: BLE001 - whatever it is, its text is the reason
        return str(error)
    return None


def _chromium() -> str | None:
    path = find_chromium()
    if path is None:
        return "no chromium in PATH"
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return None if done.returncode == 0 else f"{path} does not start: {done.stderr.strip()}"


def _torch() -> str | None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)} (pip install -e '.[bench]')" if missing else None


def _docker() -> str | None:
    if shutil.which("docker") is None:
        return "no docker in PATH"
    done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60, check=False)
    return None if done.returncode == 0 else "no Docker engine answers `docker info`"


def _vllm() -> str | None:
    if any(VLLM_VENV.glob("lib/python3*/site-packages/vllm/__init__.py")):
        return None
    return f"no vLLM in {VLLM_VENV}: run `python -m agentrl_jax.inference.vllm_server install {VLLM_VENV}`, or set AGENTRL_VLLM_VENV"


def _smollm2() -> str | None:
    folder = Path(__file__).parent.parent / "models" / "smollm2-135m"
    return None if folder.is_dir() else f"no {folder}: run `make smollm2`"


# Each probe says why the part is missing, or None.
_PROBES: dict[str, Callable[[], str | None]] = {
    "bwrap": _bwrap,
    "chromium": _chromium,
    "torch": _torch,
    "docker": _docker,
    "vllm": _vllm,
    "smollm2": _smollm2,
}


@functools.cache
def _missing(part: str) -> str | None:
    return _PROBES[part]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that at the end no worker is left alone with one of them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.real("bwrap")`: skip with the reason where the part is missing; fail under REQUIRE_REAL=1."""
    for mark in item.iter_markers("real"):
        for part in mark.args:
            if part not in _PROBES:
                raise pytest.UsageError(f'{item.nodeid}: real("{part}") is unknown; known: {", ".join(_PROBES)}')
            reason = _missing(part)
            if reason is None:
                continue
            if os.environ.get("REQUIRE_REAL") == "1":
                pytest.fail(f"REQUIRE_REAL: {part} is missing: {reason}", pytrace=False)
            pytest.skip(f"{part}: {reason}")


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser; tests that use it are marked `real("chromium")`."""
    path = find_chromium()
    assert path is not None
    return path


@pytest.fixture(scope="session")
def vllm_venv() -> Path:
    """Environment that vLLM is installed in; tests that use it are marked `real("vllm")`."""
    return VLLM_VENV


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of the tiny experiment, never stopped. Tests that use it are marked `real("bwrap")`; none may change it."""
    from tests import launch

    root = tmp_path_factory.mktemp("finished")
    ended = launch.train(root)
    assert ended.code == 0, ended.err
    return root / "tiny"
