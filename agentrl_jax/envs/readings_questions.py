"""Questions about measurements (readings.csv) and about people (staff.db). Each kind of question is one function."""
# ruff: noqa: D103 - each is explained by what it asks

import math
import statistics
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import pairwise
from random import Random
from typing import Any

from agentrl_jax.envs.tables import Question, csv_file, database, highest, mean, ranked, repeated, totals

SENSORS = ("attic", "cellar", "hall", "roof")
TEAMS = ("design", "finance", "support", "testing")
OFFICES = ("Oslo", "Ghent", "Riga")
START = datetime(2025, 3, 1)
LOAD = "import csv\nrows = list(csv.DictReader(open('readings.csv')))"
STAFF = "import sqlite3\ndb = sqlite3.connect('staff.db')"

Reading = dict[str, Any]


def readings(rng: Random, *, missing: float = 0.0) -> list[Reading]:
    """One row for each sensor and time, of which no two are the same; a share of `missing` has no value."""
    rows = []
    for sensor in SENSORS:
        level, drift = rng.uniform(5, 25), rng.uniform(-0.8, 0.8)
        for minutes in sorted(rng.sample(range(0, 3 * 1440, 10), rng.randint(11, 18))):
            value = round(level + drift * minutes / 60 + rng.gauss(0, 1.5), 1)
            rows.append({"time": START + timedelta(minutes=minutes), "sensor": sensor, "value": None if rng.random() < missing else value})
    return rng.sample(rows, len(rows))


def staff(rng: Random) -> list[dict[str, Any]]:
    """People; some salaries are not known."""
    return [
        {
            "id": number,
            "team": rng.choice(TEAMS),
            "office": rng.choice(OFFICES),
            "started": date(rng.randint(2012, 2024), rng.randint(1, 12), rng.randint(1, 28)),
            "salary": None if rng.random() < 0.15 else 100 * rng.randint(250, 900),
        }
        for number in range(1, rng.randint(35, 60))
    ]


def of(rows: list[Reading], sensor: str) -> list[Reading]:
    """The readings of a sensor that have a value, in the order of time."""
    return sorted((r for r in rows if r["sensor"] == sensor and r["value"] is not None), key=lambda r: r["time"])


# Level 0


def warmest(rng: Random) -> Question:
    rows = readings(rng)
    day = START.date() + timedelta(days=rng.randrange(3))
    todays = [r for r in rows if r["time"].date() == day]
    averages = {s: statistics.fmean(values) for s in SENSORS if (values := [r["value"] for r in todays if r["sensor"] == s])}
    return Question(
        files={"readings.csv": csv_file(rows, rng)},
        ask=f"Which sensor has the highest average value on {day}?",
        value=lambda slip: highest({s: max(r["value"] for r in todays if r["sensor"] == s) for s in averages} if slip else averages),
        load=LOAD,
        code=f"values = {{}}\nfor r in rows:\n    if r['time'].startswith('{day}'):\n"
        "        values.setdefault(r['sensor'], []).append(float(r['value']))\n"
        "result = max(values, key=lambda s: sum(values[s]) / len(values[s]))",
        slip=("sum(values[s]) / len(values[s])", "max(values[s])"),
    )


def team_size(rng: Random) -> Question:
    people, team = staff(rng), rng.choice(TEAMS)
    members = [p for p in people if p["team"] == team]
    return Question(
        files={"staff.db": database(staff=people)},
        ask=f"How many people are in the team {team}? The table staff of staff.db has one row for each.",
        value=lambda slip: sum(not slip or p["salary"] is not None for p in members),
        load=STAFF,
        code=f"result = db.execute(\"select count(*) from staff where team = '{team}'\").fetchone()[0]",
        slip=("count(*)", "count(salary)"),
    )


# Level 1


def mean_celsius(rng: Random) -> Question:
    rows, sensor = readings(rng), rng.choice(SENSORS)
    shown = []
    for r in rows:
        unit = rng.choice("CF")
        shown.append({**r, "value": round(r["value"] * 1.8 + 32, 2) if unit == "F" else r["value"], "unit": unit})
    return Question(
        files={"readings.csv": csv_file(shown, rng)},
        ask=f"What is the average value of the sensor {sensor} in degrees Celsius? Readings are in degrees C or F, as their unit says.",
        value=lambda slip: mean([r["value"] for r in (shown if slip else rows) if r["sensor"] == sensor]),
        load=LOAD,
        code="def celsius(r):\n    return (float(r['value']) - 32) / 1.8 if r['unit'] == 'F' else float(r['value'])\n"
        f"values = [celsius(r) for r in rows if r['sensor'] == '{sensor}']\nresult = sum(values) / len(values)",
        slip=("(float(r['value']) - 32) / 1.8", "float(r['value'])"),
        tolerance=0.01,
    )


def median_salary(rng: Random) -> Question:
    people, team = staff(rng), rng.choice(TEAMS)
    known = sorted(p["salary"] for p in people if p["team"] == team and p["salary"] is not None)

    def value(slip: bool) -> float | None:
        return (known[len(known) // 2] if slip else statistics.median(known)) if known else None

    return Question(
        files={"staff.db": database(staff=people)},
        ask=f"What is the median salary in the team {team}, leaving out people whose salary is not known? See the table staff of staff.db.",
        value=value,
        load=f"{STAFF}\nimport statistics",
        code=f"values = sorted(v for (v,) in db.execute(\"select salary from staff where team = '{team}'\") if v is not None)\n"
        "result = statistics.median(values)",
        slip=("statistics.median(values)", "values[len(values) // 2]"),
        tolerance=0.01,
    )


def longest_gap(rng: Random) -> Question:
    rows, sensor = readings(rng), rng.choice(SENSORS)
    mine = [r["time"] for r in rows if r["sensor"] == sensor]

    def value(slip: bool) -> float:
        times = mine if slip else sorted(mine)
        return max(b - a for a, b in pairwise(times)) // timedelta(minutes=1)

    return Question(
        files={"readings.csv": csv_file(rows, rng)},
        ask=f"What is the longest time, in minutes, between two consecutive readings of the sensor {sensor}? The file is in no order.",
        value=value,
        load=f"{LOAD}\nfrom datetime import datetime, timedelta",
        code=f"times = sorted(datetime.fromisoformat(r['time']) for r in rows if r['sensor'] == '{sensor}')\n"
        "result = max(b - a for a, b in zip(times, times[1:])) // timedelta(minutes=1)",
        slip=("sorted(", "list("),
    )


# Level 2


def without_outliers(rng: Random) -> Question:
    rows, sensor = readings(rng), rng.choice(SENSORS)
    for r in rng.sample(of(rows, sensor), 1):
        r["value"] = rng.choice((-99.9, 250.0, 999.9))
    values = [r["value"] for r in of(rows, sensor)]
    middle, spread = statistics.fmean(values), statistics.pstdev(values)
    kept = [v for v in values if abs(v - middle) <= 2.5 * spread]
    return Question(
        files={"readings.csv": csv_file(rows, rng)},
        ask=f"Of the readings of the sensor {sensor}, leave out those more than 2.5 standard deviations from the mean (both of all its "
        "readings; the population's standard deviation). What is the average value of the others?",
        value=lambda slip: mean(values if slip else kept),
        load=f"{LOAD}\nimport statistics",
        code=f"values = [float(r['value']) for r in rows if r['sensor'] == '{sensor}']\n"
        "middle, spread = statistics.mean(values), statistics.pstdev(values)\n"
        "kept = [v for v in values if abs(v - middle) <= 2.5 * spread]\nresult = sum(kept) / len(kept)",
        slip=("sum(kept) / len(kept)", "middle"),
        tolerance=0.01,
    )


def slope(rng: Random) -> Question:
    rows, sensor = readings(rng, missing=0.15), rng.choice(SENSORS)
    points = [((r["time"] - START) / timedelta(hours=1), r["value"]) for r in of(rows, sensor)]

    def value(slip: bool) -> float | None:
        xs = [float(i) if slip else hours for i, (hours, _) in enumerate(points)]
        return statistics.linear_regression(xs, [y for _, y in points]).slope if len(points) > 2 else None

    return Question(
        files={"readings.csv": csv_file(rows, rng)},
        ask=f"By how much does the value of the sensor {sensor} rise per hour, by a least-squares line through its readings over time? "
        "Leave out readings without a value.",
        value=value,
        load=f"{LOAD}\nimport statistics\nfrom datetime import datetime",
        code=f"mine = sorted((r['time'], float(r['value'])) for r in rows if r['sensor'] == '{sensor}' and r['value'])\n"
        "hours = [datetime.fromisoformat(t).timestamp() / 3600 for t, v in mine]\n"
        "result = statistics.linear_regression(hours, [v for t, v in mine]).slope",
        slip=("hours = [datetime.fromisoformat(t).timestamp() / 3600 for t, v in mine]", "hours = list(range(len(mine)))"),
        tolerance=0.001,
    )


def percentile(rng: Random) -> Question:
    rows, sensor, share = readings(rng), rng.choice(SENSORS), rng.choice((75, 80, 90))
    shown = repeated(rows, rng)

    def value(slip: bool) -> float:
        values = sorted(r["value"] for r in (shown if slip else rows) if r["sensor"] == sensor)
        return values[math.ceil(len(values) * share / 100) - 1]

    return Question(
        files={"readings.csv": csv_file(shown, rng)},
        ask=f"What is the {share}th percentile of the values of the sensor {sensor}: the smallest of its values such that at least "
        f"{share} % of its readings are not above it? Some rows are in the file twice, with the same sensor and time: count each once.",
        value=value,
        load=f"{LOAD}\nimport math",
        code=f"once = list({{(r['sensor'], r['time']): r for r in rows}}.values())\n"
        f"values = sorted(float(r['value']) for r in once if r['sensor'] == '{sensor}')\n"
        f"result = values[math.ceil(len(values) * {share} / 100) - 1]",
        slip=("for r in once", "for r in rows"),
        tolerance=0.01,
    )


def in_utc(rng: Random) -> Question:
    day = START.date() + timedelta(days=1)
    rows = readings(rng)
    shown = []
    for r in rows:
        zone = timezone(timedelta(hours=rng.choice((-5, 0, 2, 9))))
        shown.append({**r, "time": r["time"].replace(tzinfo=UTC).astimezone(zone).isoformat()})
    return Question(
        files={"readings.csv": csv_file(shown, rng)},
        ask=f"How many readings were taken on {day}, by the clock of UTC? The times say how far they are from it.",
        value=lambda slip: (
            sum(datetime.fromisoformat(s["time"]).date() == day for s in shown) if slip else sum(r["time"].date() == day for r in rows)
        ),
        load=f"{LOAD}\nfrom datetime import date, datetime, timezone",
        code=f"day = date.fromisoformat('{day}')\n"
        "result = sum(datetime.fromisoformat(r['time']).astimezone(timezone.utc).date() == day for r in rows)",
        slip=(".astimezone(timezone.utc)", ""),
    )


def full_years(rng: Random) -> Question:
    people, years = staff(rng), rng.randint(2, 8)
    day = date(2025, rng.randint(1, 12), rng.randint(1, 28))

    def value(slip: bool) -> int:
        return sum(
            day.year - p["started"].year - (not slip and (day.month, day.day) < (p["started"].month, p["started"].day)) >= years
            for p in people
        )

    return Question(
        files={"staff.db": database(staff=people)},
        ask=f"How many people had, on {day}, been in the company for at least {years} full years? See the table staff of staff.db.",
        value=value,
        load=f"{STAFF}\nfrom datetime import date\ndays = [date.fromisoformat(t) for (t,) in db.execute('select started from staff')]",
        code=f"day = date.fromisoformat('{day}')\ndef full(d):\n"
        "    return day.year - d.year - ((day.month, day.day) < (d.month, d.day))\n"
        f"result = sum(full(d) >= {years} for d in days)",
        slip=(" - ((day.month, day.day) < (d.month, d.day))", ""),
    )


def by_rent(rng: Random) -> Question:
    people = staff(rng)
    rents = [{"office": office, "rent": 1000 * rng.randint(5, 40)} for office in OFFICES]
    heads = totals((p["office"], 1) for p in people)
    paid = totals((p["office"], 1) for p in people if p["salary"] is not None)

    def value(slip: bool) -> tuple[str, ...] | None:
        return ranked({r["office"]: r["rent"] / (paid if slip else heads).get(r["office"], 1) for r in rents}, len(OFFICES))

    return Question(
        files={"staff.db": database(staff=people), "rents.csv": csv_file(rents, rng)},
        ask="Order the offices by rent per person who works there, the highest first. The table staff of staff.db has one row for each "
        "person, rents.csv the rents.",
        value=value,
        load=f"{STAFF}\nimport csv\nrents = {{r['office']: float(r['rent']) for r in csv.DictReader(open('rents.csv'))}}",
        code="heads = dict(db.execute('select office, count(*) from staff group by office'))\n"
        "each = {office: rents[office] / heads[office] for office in rents}\nresult = ', '.join(sorted(each, key=each.get)[::-1])",
        slip=("count(*)", "count(salary)"),
    )


LEVELS = (
    (warmest, team_size),
    (mean_celsius, median_salary, longest_gap),
    (without_outliers, slope, percentile, in_utc, full_years, by_rent),
)
