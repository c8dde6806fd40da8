"""A run folder as one record, with what could not be read said in words."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl_jax.chat.tokenizer import ChatTokenizer
from agentrl_jax.data.credits import read_credits
from agentrl_jax.data.episode import Episode
from agentrl_jax.data.frames import StoreError
from agentrl_jax.data.store import read, salvage
from agentrl_jax.report import metrics
from agentrl_jax.report.sample import Entry, choose

METRICS, EPISODES, CREDITS = metrics.FILE, "episodes.store", "credits.store"
TOKENIZER, CONFIG = "tokenizer.json", "config.json"
"""Names of the files of a run folder."""


@dataclass(frozen=True)
class Run:
    """What a page is made of.

    config:     resolved configuration as JSON has it; None where the run holds none
    records:    of `metrics.jsonl`, in the order of the steps
    collected:  every finished episode of the store, by its outline
    episodes:   those of them that the page shows, in the order of the steps
    advantages: by id of a shown episode, f32[n] of its policy tokens in order; missing where no credit was stored
    spell:      bytes of a token id; None where the run holds no tokenizer
    problems:   what could not be read, a sentence each
    """

    name: str
    config: Any = None
    records: tuple[Mapping[str, Any], ...] = ()
    collected: tuple[Entry, ...] = ()
    episodes: tuple[Episode, ...] = ()
    advantages: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    spell: Callable[[int], bytes] | None = None
    problems: tuple[str, ...] = ()


def load(folder: Path) -> Run:
    """Read a run folder: `metrics.jsonl`, `episodes.store`, `credits.store`, `tokenizer.json` and `config.json`, each of them optional.

    What is damaged is left out and named in `problems`; of a damaged store all that can be salvaged is read. Raises
    FileNotFoundError where the folder holds no run, and ValueError for damaged metrics.
    """
    if not (folder / METRICS).is_file() and not (folder / EPISODES).is_file():
        raise FileNotFoundError(f"{folder}: no run here; a run folder holds {METRICS} or {EPISODES}")
    problems: list[str] = []
    records = metrics.read(folder) if (folder / METRICS).is_file() else []
    collected, episodes = _episodes(folder / EPISODES, problems)
    return Run(
        name=folder.resolve().name,
        config=_config(folder / CONFIG, problems),
        records=tuple(records),
        collected=tuple(collected),
        episodes=tuple(episodes),
        advantages=_advantages(folder / CREDITS, episodes, problems),
        spell=_spell(folder / TOKENIZER, problems) if episodes else None,
        problems=tuple(problems),
    )


def _episodes(path: Path, problems: list[str]) -> tuple[list[Entry], list[Episode]]:
    """Outline of every episode, and the chosen episodes; of a damaged store, those that can be salvaged."""
    if not path.is_file():
        return [], []
    try:
        return _chosen(path)
    except StoreError as damage:
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / path.name
            try:
                saved = salvage(path, copy)
            except StoreError:
                problems.append(f"No episode could be read: {damage}.")
                return [], []
            cut = f" Lost with them: {', '.join(saved.cut)}." if saved.cut else ""
            problems.append(f"{damage}. Shown is what is left: {saved.lost} bytes are lost, {saved.frames} frames are good.{cut}")
            return _chosen(copy)


def _chosen(path: Path) -> tuple[list[Entry], list[Episode]]:
    """Two passes, so that the episodes of a long run need not all fit into memory."""
    collected = [Entry.of(episode) for episode in read(path)]
    shown = {entry.id for entry in choose(collected)}
    return collected, sorted((episode for episode in read(path) if episode.id in shown), key=lambda e: (e.step, e.group))


def _advantages(path: Path, episodes: list[Episode], problems: list[str]) -> dict[str, NDArray[np.float32]]:
    if not path.is_file():
        return {}
    shown = {episode.id: episode for episode in episodes}
    stored: dict[str, tuple[NDArray[np.float32], ...]] = {}
    try:
        stored.update(item for item in read_credits(path) if item[0] in shown)
    except StoreError as damage:
        problems.append(f"{damage}. Advantages stored after the damage are not shown.")
    found: dict[str, NDArray[np.float32]] = {}
    for name, parts in stored.items():
        segments = shown[name].segments
        if [len(part) for part in parts] == [len(segment) for segment in segments]:
            found[name] = np.concatenate([np.zeros(0, np.float32), *[p[s.mask] for p, s in zip(parts, segments, strict=True)]])
        elif parts:
            problems.append(f"{path}: the credit of episode {name} is not as long as its segments and is not shown.")
    return found


def _spell(path: Path, problems: list[str]) -> Callable[[int], bytes] | None:
    if not path.is_file():
        problems.append(f"{path}: missing, so tokens are shown as their ids.")
        return None
    try:
        tokenizer = ChatTokenizer.load(path)
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing narrower
        problems.append(f"{path}: not a tokenizer this code can read ({error}), so tokens are shown as their ids.")
        return None
    return lambda token: tokenizer.decode_bytes([token])


def _config(path: Path, problems: list[str]) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes(), parse_constant=str)
    except ValueError as error:
        problems.append(f"{path}: not JSON ({error}), so no configuration is shown.")
        return None
