"""Questions about a shop: orders.csv, customers.csv, and the products in shop.db. Each kind of question is one function."""
# ruff: noqa: D103 - each is explained by what it asks

from datetime import date, timedelta
from random import Random
from typing import Any

from agentrl_jax.envs.tables import Question, csv_file, database, highest, mean, ranked, repeated, totals

REGIONS = ("north", "south", "east", "west")
CITIES = ("Leeds", "Porto", "Turin", "Graz", "Lyon")
CATEGORIES = {
    "garden": ("spade", "rake", "hose"),
    "kitchen": ("kettle", "pan", "ladle"),
    "office": ("stapler", "lamp", "binder"),
}
PRODUCTS = tuple(product for members in CATEGORIES.values() for product in members)
FIRST = date(2024, 1, 1)
LOAD = "import csv\nrows = list(csv.DictReader(open('orders.csv')))"
ONCE = "Some orders are in the file more than once, with the same number: count each once."

Order = dict[str, Any]


def orders(rng: Random, *, missing: float = 0.0, dearest: float = 90.0) -> list[Order]:
    """Orders with different numbers; a share of `missing` does not say how many units."""
    count = rng.randint(30, 60)
    buyers = [f"C{number:02}" for number in range(1, rng.randint(7, 13))]
    return [
        {
            "order": number,
            "date": FIRST + timedelta(days=rng.randrange(366)),
            "customer": rng.choice(buyers),
            "product": rng.choice(PRODUCTS),
            "region": rng.choice(REGIONS),
            "units": None if rng.random() < missing else rng.randint(1, 12),
            "price": round(rng.uniform(2, dearest), 2),
        }
        for number in range(1001, 1001 + count)
    ]


def customers(rng: Random, bought: list[Order]) -> list[dict[str, Any]]:
    """One row for each customer that ordered."""
    names = sorted({order["customer"] for order in bought})
    return [{"customer": c, "city": rng.choice(CITIES), "joined": FIRST - timedelta(days=rng.randrange(-300, 1200))} for c in names]


def products(rng: Random) -> list[dict[str, Any]]:
    """All products."""
    return [{"product": p, "category": c, "cost": round(rng.uniform(1, 40), 2)} for c, members in CATEGORIES.items() for p in members]


def revenue(order: Order) -> float:
    """Of one order."""
    return order["units"] * order["price"]


# Level 0: one clean file, one step.


def at_least(rng: Random) -> Question:
    rows, region, units = orders(rng), rng.choice(REGIONS), rng.randint(3, 9)
    return Question(
        files={"orders.csv": csv_file(rows, rng)},
        ask=f"How many orders from the {region} region have at least {units} units?",
        value=lambda slip: sum(r["region"] == region and r["units"] >= units + slip for r in rows),
        load=LOAD,
        code=f"result = sum(r['region'] == '{region}' and int(r['units']) >= {units} for r in rows)",
        slip=(">=", ">"),
    )


def mean_units(rng: Random) -> Question:
    rows, region = orders(rng, missing=0.2), rng.choice(REGIONS)
    here = [r["units"] for r in rows if r["region"] == region]
    return Question(
        files={"orders.csv": csv_file(rows, rng)},
        ask=f"What is the average number of units of the orders from the {region} region? Leave out orders whose units are missing.",
        value=lambda slip: mean([u or 0 for u in here if slip or u is not None]),
        load=LOAD,
        code=f"units = [r['units'] for r in rows if r['region'] == '{region}']\n"
        "known = [int(u) for u in units if u]\nresult = sum(known) / len(known)",
        slip=("/ len(known)", "/ len(units)"),
        tolerance=0.01,
    )


def top_product(rng: Random) -> Question:
    rows = orders(rng)
    return Question(
        files={"orders.csv": csv_file(rows, rng)},
        ask="Of which product were the most units ordered in all?",
        value=lambda slip: highest(totals((r["product"], 1 if slip else r["units"]) for r in rows)),
        load=LOAD,
        code="total = {}\nfor r in rows:\n    total[r['product']] = total.get(r['product'], 0) + int(r['units'])\n"
        "result = max(total, key=total.get)",
        slip=("+ int(r['units'])", "+ 1"),
    )


def buyers_of(rng: Random) -> Question:
    rows = orders(rng)
    product = rng.choice(PRODUCTS)
    buyers = [r["customer"] for r in rows if r["product"] == product]
    return Question(
        files={"orders.csv": csv_file(rows, rng)},
        ask=f"How many different customers ordered the product {product}?",
        value=lambda slip: len(buyers) if slip else len(set(buyers)),
        load=LOAD,
        code=f"buyers = [r['customer'] for r in rows if r['product'] == '{product}']\nresult = len(set(buyers))",
        slip=("len(set(buyers))", "len(buyers)"),
    )


def between(rng: Random) -> Question:
    rows = orders(rng)
    first, last = sorted(rng.sample([r["date"] for r in rows], 2))
    return Question(
        files={"orders.csv": csv_file(rows, rng)},
        ask=f"How many orders were made from {first} to {last}, both days included?",
        value=lambda slip: sum(first <= r["date"] <= last - timedelta(days=slip) for r in rows),
        load=LOAD,
        code=f"result = sum('{first}' <= r['date'] <= '{last}' for r in rows)",
        slip=(f"<= '{last}'", f"< '{last}'"),
    )


# Level 1: files as people leave them, or two that belong together.


def turnover(rng: Random) -> Question:
    rows = orders(rng)
    shown = repeated(rows, rng)
    return Question(
        files={"orders.csv": csv_file(shown, rng)},
        ask=f"What is the revenue (units times price) of all orders together? {ONCE}",
        value=lambda slip: sum(map(revenue, shown if slip else rows)),
        load=LOAD,
        code="once = list({r['order']: r for r in rows}.values())\nresult = sum(int(r['units']) * float(r['price']) for r in once)",
        slip=("for r in once", "for r in rows"),
        tolerance=0.01,
    )


def mean_price(rng: Random) -> Question:
    rows, product = orders(rng, dearest=2500), rng.choice(PRODUCTS)
    prices = [r["price"] for r in rows if r["product"] == product]
    return Question(
        files={"orders.csv": csv_file(rows, rng, price="${:,.2f}".format)},
        ask=f"What is the average price, in dollars, of the orders of the product {product}? Prices are written as $1,234.50.",
        value=lambda slip: mean([p for p in prices if not slip or p < 1000]),
        load=LOAD,
        code=f"prices = [r['price'] for r in rows if r['product'] == '{product}']\n"
        "values = [float(p.strip('$').replace(',', '')) for p in prices]\nresult = sum(values) / len(values)",
        slip=("for p in prices]\nresult", "for p in prices if ',' not in p]\nresult"),
        tolerance=0.01,
    )


def in_city(rng: Random) -> Question:
    rows, city = orders(rng), rng.choice(CITIES)
    people = [
        {"customer": f"C{number:02}", "city": rng.choice(CITIES), "joined": FIRST - timedelta(days=rng.randrange(900))}
        for number in range(1, rng.randint(25, 45))
    ]
    styles = {p["customer"]: rng.choice((str, str, str.upper, str.lower, " {}".format, "{}  ".format)) for p in people}
    shown = [{**p, "city": styles[p["customer"]](p["city"])} for p in people]
    return Question(
        files={"customers.csv": csv_file(shown, rng), "orders.csv": csv_file(rows, rng)},
        ask=f"How many customers live in {city}? Cities were typed by hand: capitals and spaces around them mean nothing.",
        value=lambda slip: sum((s if slip else p)["city"] == city for p, s in zip(people, shown, strict=True)),
        load="import csv\npeople = list(csv.DictReader(open('customers.csv')))",
        code=f"result = sum(p['city'].strip().title() == '{city}' for p in people)",
        slip=(".strip().title()", ""),
    )


def in_month(rng: Random) -> Question:
    rows, month = orders(rng), rng.randint(1, 12)
    shown = [{**r, "date": r["date"].strftime(rng.choice(("%Y-%m-%d", "%d/%m/%Y")))} for r in rows]

    def value(slip: bool) -> int:
        return sum((r["date"].day if slip and "/" in s["date"] else r["date"].month) == month for r, s in zip(rows, shown, strict=True))

    return Question(
        files={"orders.csv": csv_file(shown, rng)},
        ask=f"How many orders were made in {date(2024, month, 1):%B} 2024? Dates are written as 2024-03-05 or, day first, as 05/03/2024.",
        value=value,
        load=LOAD,
        code="def month(text):\n    return int(text[5:7]) if '-' in text else int(text[3:5])\n"
        f"result = sum(month(r['date']) == {month} for r in rows)",
        slip=("text[3:5]", "text[:2]"),
    )


def profit(rng: Random) -> Question:
    rows, goods, category = orders(rng), products(rng), rng.choice(list(CATEGORIES))
    cost = {g["product"]: g["cost"] for g in goods if g["category"] == category}
    sold = [r for r in rows if r["product"] in cost]
    return Question(
        files={"orders.csv": csv_file(rows, rng), "shop.db": database(products=goods)},
        ask=f"What is the profit on all orders of the category {category}? Each unit earns the order's price less the product's cost. "
        "The table products of shop.db has the products.",
        value=lambda slip: sum((r["price"] - cost[r["product"]]) * (1 if slip else r["units"]) for r in sold),
        load=f"{LOAD}\nimport sqlite3\ndb = sqlite3.connect('shop.db')",
        code=f"cost = dict(db.execute(\"select product, cost from products where category = '{category}'\"))\n"
        "result = sum((float(r['price']) - cost[r['product']]) * int(r['units']) for r in rows if r['product'] in cost)",
        slip=(" * int(r['units'])", ""),
        tolerance=0.01,
    )


# Level 2: several steps, one of them easily missed.

CLIENTS = f"{LOAD}\npeople = {{p['customer']: p for p in csv.DictReader(open('customers.csv'))}}"


def best_city(rng: Random) -> Question:
    rows = orders(rng)
    people, shown = customers(rng, rows), repeated(rows, rng)
    city = {p["customer"]: p["city"] for p in people}
    return Question(
        files={"customers.csv": csv_file(people, rng), "orders.csv": csv_file(shown, rng)},
        ask=f"The customers of which city brought the highest revenue (units times price)? {ONCE}",
        value=lambda slip: highest(totals((city[r["customer"]], revenue(r)) for r in (shown if slip else rows))),
        load=CLIENTS,
        code="once = list({r['order']: r for r in rows}.values())\ntotal = {}\nfor r in once:\n    city = people[r['customer']]['city']\n"
        "    total[city] = total.get(city, 0) + int(r['units']) * float(r['price'])\nresult = max(total, key=total.get)",
        slip=("for r in once", "for r in rows"),
    )


def best_three(rng: Random) -> Question:
    rows = orders(rng, missing=0.1)
    known = [r for r in rows if r["units"] is not None]
    return Question(
        files={"orders.csv": csv_file(rows, rng)},
        ask="Which three products brought the highest revenue (units times price), best first? Leave out orders whose units are missing.",
        value=lambda slip: ranked(totals((r["product"], r["units"] if slip else revenue(r)) for r in known), 3),
        load=LOAD,
        code="total = {}\nfor r in rows:\n    if r['units']:\n        earned = int(r['units']) * float(r['price'])\n"
        "        total[r['product']] = total.get(r['product'], 0) + earned\nresult = ', '.join(sorted(total, key=total.get)[::-1][:3])",
        slip=(" * float(r['price'])", ""),
    )


def share_of_new(rng: Random) -> Question:
    rows = orders(rng)
    people, day = customers(rng, rows), FIRST - timedelta(days=rng.randrange(-200, 600))
    new = {p["customer"] for p in people if p["joined"] >= day}

    def value(slip: bool) -> float:
        weight = (lambda r: 1) if slip else revenue
        return 100 * sum(weight(r) for r in rows if r["customer"] in new) / sum(map(weight, rows))

    return Question(
        files={"customers.csv": csv_file(people, rng), "orders.csv": csv_file(rows, rng)},
        ask=f"What percentage of the revenue (units times price) came from customers who joined on {day} or later?",
        value=value,
        load=CLIENTS,
        code="def earned(r):\n    return int(r['units']) * float(r['price'])\n"
        f"new = sum(earned(r) for r in rows if people[r['customer']]['joined'] >= '{day}')\nresult = 100 * new / sum(map(earned, rows))",
        slip=("int(r['units']) * float(r['price'])", "1"),
        tolerance=0.01,
    )


def days_between(rng: Random) -> Question:
    rows = orders(rng)
    dates = {c: [r["date"] for r in rows if r["customer"] == c] for c in dict.fromkeys(r["customer"] for r in rows)}
    spans = [(max(days) - min(days)).days for days in dates.values() if len(days) > 1]
    return Question(
        files={"orders.csv": csv_file(rows, rng)},
        ask="How many days passed, on average over the customers with at least two orders, between a customer's first and last order?",
        value=lambda slip: sum(spans) / (len(dates) if slip else len(spans)) if spans else None,
        load=f"{LOAD}\nfrom datetime import date",
        code="days = {}\nfor r in rows:\n    days.setdefault(r['customer'], []).append(date.fromisoformat(r['date']))\n"
        "spans = [(max(d) - min(d)).days for d in days.values() if len(d) > 1]\nresult = sum(spans) / len(spans)",
        slip=(" if len(d) > 1", ""),
        tolerance=0.01,
    )


LEVELS = (
    (at_least, mean_units, top_product, buyers_of, between),
    (turnover, mean_price, in_city, in_month, profit),
    (best_city, best_three, share_of_new, days_between),
)
