"""Checkpoints of a run: everything that the next step depends on, by Orbax, each one whole or absent."""

import json
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from agentrl_jax.models.distributed import leads

SUMS = "crc32.json"  # in the folder of a checkpoint, of every other file in it


class CheckpointError(Exception):
    """A checkpoint cannot be read or written. The message names the folder and what to do."""


class Checkpoints:
    """The last `keep` checkpoints in a folder. A save that is interrupted leaves the earlier ones as they are."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, create=True, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Write the pytree `state` and the JSON-able `meta` (cursor, versions, names) as the checkpoint of `step`, all processes together.

        Raises CheckpointError if it cannot be written; earlier checkpoints stay.
        """
        if step == self.latest:
            return
        try:
            saved = {"meta": meta, "layout": _layout(state)}
            self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(saved)))
            folder = self._folder / str(step)
            if leads():
                (folder / SUMS).write_text(json.dumps(_sums(folder)))
        except Exception as error:
            raise CheckpointError(
                f"{self._folder / str(step)}: cannot write the checkpoint: {_first_line(error)}; free some space"
            ) from error

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]]:
        """The newest checkpoint: its step, its state (structure, shapes, types and devices of `like`), its meta.

        Raises CheckpointError if there is none, it is damaged, or it was made by another model or optimizer.
        """
        step = self.latest
        if step is None:
            raise CheckpointError(f"{self._folder}: no checkpoint")
        self._check(step)
        record = self._read(step, record=ocp.args.JsonRestore())["record"]
        wanted = _layout(like)
        for name in sorted(wanted.keys() | record["layout"].keys()):
            if (here := wanted.get(name)) != (there := record["layout"].get(name)):
                raise CheckpointError(
                    f"{self._folder / str(step)}: {name} is {there} in the checkpoint and {here} in this experiment: "
                    "resume with the experiment it was made by, or choose another run folder"
                )
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return step, self._read(step, state=ocp.args.StandardRestore(template))["state"], record["meta"]

    def _check(self, step: int) -> None:
        """Before Orbax reads it: damage makes Orbax print a page of tracebacks for each array, and a flipped bit it may not see at all."""
        folder = self._folder / str(step)
        if not (folder / SUMS).exists():
            return  # the process ended just before it was written
        try:
            now, then = _sums(folder), json.loads((folder / SUMS).read_text())
        except (OSError, ValueError) as error:
            raise self._unreadable(step, error) from error
        for name in then:
            if now.get(name) != then[name]:
                raise self._unreadable(step, ValueError(f"{name} is {'damaged' if name in now else 'missing'}"))

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        others = sorted(s for s in self._manager.all_steps() if s != step)
        fix = f"move it away to go on from step {others[-1]}" if others else "move it away to start again from the warm start"
        return CheckpointError(f"{self._folder / str(step)}: cannot read the checkpoint: {_first_line(error)}; {fix}")


def _layout(state: Any) -> dict[str, str]:
    """Name and shape of every array of the state."""
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _sums(folder: Path) -> dict[str, int]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SUMS]
    return {str(path.relative_to(folder)): zlib.crc32(path.read_bytes()) for path in files}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
