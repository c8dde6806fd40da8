"""Check every case of a golden folder against this package, in float64; its models in float32.

    python tests/golden/run.py FOLDER [--first] [FUNCTION ...]

FOLDER holds `manifest.json` and one `.npz` per family, and model folders in `hf_models`. Prints passed, failed and unsupported per function
and per model (hf.NAME); exits with 1 on a failure. FUNCTION is the beginning of a name; --first looks at one case of each function only.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

from tests.golden import adapters, models  # noqa: F401
from tests.golden.adapter import ADAPTERS, UNSUPPORTED, Case

TOLERANCE = {"float64": (1e-7, 1e-9), "float32 inside": (2e-5, 1e-6)}
"""Kind of arithmetic that made a case -> (relative, absolute) tolerance."""


def families(folder: Path) -> list[dict[str, Any]]:
    """Those with functions; the models' family has none."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return [family for family in manifest.get("families", ()) if str(family.get("file", "")).endswith(".npz")]


def cases(folder: Path, function: str) -> Iterator[Case]:
    """All cases of one function."""
    for family in families(folder):
        named = [case for case in family["cases"] if case["fn"] == function]
        if not named:
            continue
        with np.load(folder / family["file"], allow_pickle=False) as arrays:
            for case in named:
                inputs: dict[str, Any] = {name: wide(arrays[f"{case['id']}/in/{name}"]) for name in case["inputs"]}
                inputs |= dict.fromkeys(case.get("null_inputs", ()))
                outputs: dict[str, Any] = {name: arrays[f"{case['id']}/out/{name}"] for name in case["outputs"]}
                outputs |= {name: number(value) for name, value in case["out_scalars"].items()}
                precision = "float64" if case["precision"].startswith("float64") else "float32 inside"
                raises = case.get("raises") or None
                yield Case(case["id"], function, case["params"], inputs, outputs, case["compare"], precision, raises)


def wide(x: Any) -> Any:
    """Floats in float64, integers in int64, as the references saw them."""
    kinds = {"f": np.float64, "i": np.int64, "u": np.int64}
    return x.astype(kinds[x.dtype.kind]) if x.dtype.kind in kinds else x


def number(value: Any) -> Any:
    """A stored scalar; "nan" and the infinities are strings."""
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value


def check(case: Case) -> list[str]:
    """What differs. Raises KeyError where there is no adapter."""
    skip = {output for (name, output) in UNSUPPORTED if name in (case.function, case.id)}
    wanted = {name: value for name, value in case.outputs.items() if name not in skip}
    gradients = {name for name in wanted if name.startswith("grad")}
    found = dict(called(case)) if wanted.keys() - gradients or not gradients else {}
    for name in gradients:
        found[name] = gradient(case, name)
    return [f"{name}: {trouble}" for name, value in wanted.items() if (trouble := differs(case, found, name, value))]


def called(case: Case) -> dict[str, Any]:
    """What the adapter gives, compiled as one program where it leaves the numbers to JAX."""
    floats = {name: x for name, x in case.inputs.items() if getattr(x, "dtype", None) == np.float64}
    return compiled(lambda floats: ADAPTERS[case.function].call(case.inputs | floats, case.params), floats)


def compiled(function: Callable[[Any], Any], x: Any) -> Any:
    """`function(x)` as one program, which compiles four times as fast as its operations one by one; so these where an adapter looks at
    numbers itself."""
    try:
        return jax.jit(function)(x)
    except (jax.errors.JAXTypeError, TypeError):
        return function(x)


def gradient(case: Case, name: str) -> Any:
    """The stored gradient `name`, computed by us."""
    adapter = ADAPTERS[case.function]
    values = [output for output in case.outputs if not output.startswith("grad")]
    target, output = adapter.gradients.get(name, (name.removeprefix("grad_"), "loss" if "loss" in values else values[0]))

    def total(x: Any) -> Any:
        out = adapter.call(case.inputs | {target: x}, case.params)[output]
        weight = case.inputs.get("weight")
        return jax.numpy.sum(out if weight is None else weight * out)

    return compiled(jax.grad(total), case.inputs[target])


def differs(case: Case, found: dict[str, Any], name: str, value: Any) -> str | None:
    """One line about an output that is not what the case stores."""
    if name not in found:
        return "not given by the adapter"
    got, want = np.asarray(found[name]), np.asarray(value)
    if name in ADAPTERS[case.function].sets:
        got, want = np.sort(got), np.sort(want)
    if got.shape != want.shape:
        return f"shape {got.shape}, stored {want.shape}"
    if want.dtype.kind in "US":
        return None if (got == want).all() else f"{got.tolist()}, stored {want.tolist()}"
    mask = next((m for key, m in case.inputs.items() if key.endswith("mask") and m is not None and m.shape == want.shape), None)
    if case.compare == "mask" and mask is not None:
        got, want = got[mask != 0], want[mask != 0]
    relative, absolute = TOLERANCE[case.precision]
    finite = np.isfinite(want.astype(float))
    scale = np.abs(want[finite].astype(float)).max(initial=0.0)
    if np.allclose(got.astype(float), want.astype(float), rtol=relative, atol=absolute + relative * scale, equal_nan=True):
        return None
    return f"largest difference {np.nanmax(np.abs(got.astype(float) - want.astype(float)), initial=0.0):.3g} of {scale:.3g}"


def judged(folder: Path, function: str, first: bool) -> tuple[list[int], list[str]]:
    """(passed, failed, unsupported) cases of one function, and a line for everything that differs."""
    row, failures = [0, 0, 0], []
    for case in cases(folder, function):
        if any((name, "*") in UNSUPPORTED for name in (case.function, case.id)):
            row[2] += 1
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                trouble = check(case)
            if case.raises:
                trouble = [f"the reference raises {case.raises}"]
        except Exception as error:
            trouble = [] if case.raises and isinstance(error, ValueError) else [f"{type(error).__name__}: {str(error)[:200]}"]
        row[1 if trouble else 0] += 1
        failures += [f"{case.id}  {line}" for line in trouble]
        if first:
            break
    return row, failures


def main(arguments: list[str]) -> int:
    first = "--first" in arguments
    name, *only = [argument for argument in arguments if argument != "--first"]
    folder = Path(name)
    functions = dict.fromkeys(case["fn"] for family in families(folder) for case in family["cases"])
    jobs = {function: partial(judged, folder, function, first) for function in functions}
    jobs |= {f"hf.{model.name}": partial(models.judged, model, facts, first) for model, facts in models.described(folder).items()}
    chosen = [name for name in jobs if not only or any(name.startswith(prefix) for prefix in only)]
    if not chosen:
        print(f"{folder}: nothing to check; name a folder with manifest.json or hf_models, and functions that it holds")
        return 1
    # Nearly all of the time goes into compiling small programs, which takes one core each.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        results = [work.result() for work in [pool.submit(jobs[name]) for name in chosen]]
    print(f"{'function':44}{'passed':>8}{'failed':>8}{'unsupported':>13}")
    for function, (row, _) in zip(chosen, results, strict=True):
        print(f"{function:44}{row[0]:>8}{row[1]:>8}{row[2]:>13}")
    total = [sum(column) for column in zip(*(row for row, _ in results), strict=True)]
    print(f"{'all':44}{total[0]:>8}{total[1]:>8}{total[2]:>13}")
    for (name, output), reason in UNSUPPORTED.items():
        print(f"unsupported  {name}{'' if output == '*' else ' ' + output}: {reason}")
    for _, failures in results:
        print("".join(f"{line}\n" for line in failures), end="")
    return 1 if total[1] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
