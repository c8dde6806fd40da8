"""Questions about tables, and the tables as files: CSV, and SQLite databases whose bytes are the same on every machine."""

import csv
import io
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Answer: TypeAlias = float | str | tuple[str, ...]
Rows: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Question:
    """A question, its files, and how to answer it right and wrong.

    ask:       the question, with every rule that the answer depends on
    value:     the answer, from the records that the files were made of; given True, that of someone who makes the `slip`; None where there
               is none, as two groups are the same
    code:      Python that answers it from the files with the standard library, after `load`; leaves `result`
    slip:      (old, new): what someone who overlooks one thing writes instead in `code`
    tolerance: how far a number may be off
    """

    files: Mapping[str, bytes]
    ask: str
    value: Callable[[bool], Answer | None]
    load: str
    code: str
    slip: tuple[str, str]
    tolerance: float = 0.0


Template: TypeAlias = Callable[[Random], Question]
"""Draws a question of one kind."""


def csv_file(rows: Rows, rng: Random, **formats: Callable[[Any], str]) -> bytes:
    """Rows as CSV, the columns in any order, each value as its column's format has it: None is empty, else as `str` writes it."""
    columns = rng.sample(list(rows[0]), len(rows[0]))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[formats.get(column, _shown)(row[column]) for column in columns] for row in rows])
    return out.getvalue().encode()


def database(**tables: Rows) -> bytes:
    """Tables as an SQLite database. Dates are text."""
    with sqlite3.connect(":memory:") as connection:
        for name, rows in tables.items():
            kinds = {int: "integer", float: "real"}
            types = {
                column: next((kinds.get(type(row[column]), "text") for row in rows if row[column] is not None), "text")
                for column in rows[0]
            }
            connection.execute(f"create table {name} ({', '.join(f'{column} {kind}' for column, kind in types.items())})")
            values = [[v if v is None or isinstance(v, int | float) else str(v) for v in row.values()] for row in rows]
            connection.executemany(f"insert into {name} values ({', '.join('?' * len(types))})", values)
        connection.commit()
        image = bytearray(connection.serialize())
    connection.close()
    image[96:100] = (3040000).to_bytes(4, "big")  # the version of SQLite that wrote it, of no meaning to its readers
    return bytes(image)


def repeated(rows: Sequence[T], rng: Random) -> list[T]:
    """The rows, a sixth of them twice, in any order."""
    again = [*rows, *rng.sample(rows, max(2, len(rows) // 6))]
    return rng.sample(again, len(again))


def totals(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of each key."""
    sums: dict[str, float] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0) + value
    return sums


def ranked(sums: Mapping[str, float], count: int = 1) -> tuple[str, ...] | None:
    """The keys with the highest values, highest first; None where which they are hangs on less than 0.01."""
    order = sorted(sums, key=lambda key: -sums[key])[: count + 1]
    close = any(sums[a] - sums[b] < 0.01 for a, b in pairwise(order))
    return None if close or len(order) < count else tuple(order[:count])


def highest(sums: Mapping[str, float]) -> str | None:
    """The key with the highest value."""
    first = ranked(sums)
    return first[0] if first else None


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
