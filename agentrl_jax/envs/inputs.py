"""Inputs for the functions of the library: per function, a sampler that visits the edges as often as the middle."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

Arguments = tuple[Any, ...]
Sampler = Callable[[Random], Arguments]

WORDS = ("a", "on", "red", "tree", "Apple", "Ox", "level", "noon", "aab", "stone", "Bee", "zoo", "listen", "silent")


def _near(r: Random, *edges: int) -> int:
    """A number at most one away from an edge."""
    return r.choice(edges) + r.choice((-1, 0, 1))


def _word(r: Random, letters: str = "abc", low: int = 0, high: int = 6) -> str:
    return "".join(r.choice(letters) for _ in range(r.randint(low, high)))


def _words(r: Random, low: int = 0, high: int = 4) -> str:
    return " ".join(r.choice(WORDS) for _ in range(r.randint(low, high)))


def _list(r: Random, low: int = 0, high: int = 5, smallest: int = 0, largest: int = 9) -> list[int]:
    return [r.randint(smallest, largest) for _ in range(r.randint(low, high))]


def _same_length(r: Random, high: int = 4) -> tuple[list[int], list[int]]:
    n = r.randint(0, high)
    return _list(r, n, n), _list(r, n, n)


def _date(r: Random) -> str:
    month, day = r.choice((0, 1, 6, 12, 13)), r.choice((0, 1, 15, 31, 32))
    return r.choice(("{0}-{1:02}-{2:02}", "{0}-{1:02}-{2:02}", "{0}-{1:02}-{2:02}", "{0}-{1}", "{0}-{1}-x")).format(
        r.randint(1998, 2025), month, day
    )


def _name(r: Random) -> str:
    return r.choice(("", "", "_", "7", "x")) + _word(r, "ab_9-", 0, 4)


def _star(r: Random) -> str:
    return r.choice(("", "*", "*", "b")) + _word(r, "ab*", 0, 3) + r.choice(("", "*", "*"))


def _anagram(r: Random) -> tuple[str, str]:
    a = _word(r, "abC ", 1, 5)
    return a, r.choice((a, a.upper(), "".join(r.sample(a, len(a))), _word(r, "abC ", 1, 5)))


def _prefixed(r: Random) -> tuple[str, str]:
    start = _word(r, "ab", 0, 4)
    return start + _word(r, "ab", 0, 3), start + _word(r, "ab", 0, 3)


def _card(r: Random) -> str:
    """Half of them valid: the last digit is chosen so that the check sum fits."""
    digits = [r.randint(0, 9) for _ in range(r.randint(1, 6))]
    total = sum(d if i % 2 else (2 * d - 9 if d > 4 else 2 * d) for i, d in enumerate(reversed(digits)))
    return "".join(map(str, digits)) + str(r.choice((-total % 10, r.randint(0, 9))))


def _query(r: Random) -> str:
    return "&".join(r.choice(("", "=1", "a", "b=", "c=2", "d=x=y", "k=10")) for _ in range(r.randint(0, 3)))


SAMPLERS: Mapping[str, Sampler] = {
    # utils
    "parse_date": lambda r: (_date(r),),
    "is_leap": lambda r: (r.choice((1900, 2000, 2100, 2400, r.randint(1890, 2030), 4 * r.randint(470, 510))),),
    "month_days": lambda r: (r.randint(2018, 2026), r.choice((2, 2, r.randint(1, 12)))),
    "parse_time": lambda r: (f"{r.choice((0, 7, 12, 22, 23, 24, 25))}:{r.choice((0, 5, 30, 58, 59, 60, 61)):02}",),
    "clock": lambda r: (r.choice((_near(r, 60, 600, 1440, 1500), r.randint(0, 3000))),),
    "minutes_until": lambda r: (r.choice((0, 60, r.randint(0, 1439))), r.choice((0, 60, r.randint(0, 1439)))),
    "weekend": lambda r: (r.randint(0, 30),),
    "season": lambda r: (r.randint(1, 12),),
    "parse_bool": lambda r: (r.choice(("", " ")) + r.choice(("1", "0", "yes", "No", "TRUE", "False", "maybe", "2", "", "y", "on")),),
    "parse_range": lambda r: (f"{r.randint(0, 6)}-{r.randint(0, 8)}",),
    "parse_pair": lambda r: (_word(r, "ab", 0, 2) + r.choice(("=", "=", "")) + _word(r, "ab=1", 0, 3),),
    "is_newer": lambda r: tuple(".".join(str(r.choice((0, 1, 2, 10))) for _ in range(r.randint(1, 3))) for _ in range(2)),
    "bump": lambda r: ((r.randint(0, 5), r.randint(0, 5)), r.random() < 0.5),
    "grade": lambda r: (r.choice((_near(r, 70, 80, 90), r.randint(0, 100))),),
    "ticket": lambda r: (r.choice((_near(r, 3, 18, 65), r.randint(0, 90))),),
    "parse_rgb": lambda r: (r.choice("###x") + _word(r, "0f8", 6, 6) + r.choice(("", "", "", "0")),),
    "file_size": lambda r: (r.choice((_near(r, 0, 1024, 2048, 4096) % 5000, r.randint(0, 9999))),),
    "ordinal": lambda r: (r.choice((_near(r, 3, 11, 13, 20, 111, 113), r.randint(1, 125))),),
    "shipping": lambda r: (_near(r, 2, 3, 10, 20), r.random() < 0.6),
    # text
    "initials": lambda r: (_words(r),),
    "caesar": lambda r: (_word(r, "abmyz", 0, 5), r.randint(-3, 27)),
    "is_palindrome": lambda r: (r.choice(("noon", "Level", "A toyota", "a-b a", "ab", _word(r, "ab", 0, 4), _word(r, "aA!b", 1, 5))),),
    "count_vowels": lambda r: (_word(r, "aEioub xY", 0, 8),),
    "shorten": lambda r: (_word(r, "abcd", 0, 8), r.randint(2, 8)),
    "pad_left": lambda r: (_word(r, "123", 0, 4), r.randint(0, 6)),
    "common_prefix": _prefixed,
    "squeeze": lambda r: (_word(r, "aab", 0, 7),),
    "snake": lambda r: (_word(r, "abAB", 0, 6),),
    "mask": lambda r: (_word(r, "123456789", 0, 9),),
    "longest_word": lambda r: (_words(r),),
    "rotate_text": lambda r: (_word(r, "abcd", 0, 5), r.randint(-3, 7)),
    "is_anagram": _anagram,
    "balanced": lambda r: (r.choice(("()", "(())", "()()", _word(r, "()", 0, 6))),),
    "unwrap": lambda r: (_star(r),),
    "extension": lambda r: (r.choice(("", "a", "doc", ".rc", "x.y")) + r.choice(("", ".", ".py", ".TXT", ".tar.Gz")),),
    "middle": lambda r: (_word(r, "abcdef", 0, 7),),
    "hamming": lambda r: (_word(r, "ab", 2, 5), _word(r, "ab", 2, 5)) if r.random() < 0.2 else (w := _word(r, "ab", 0, 5), w[::-1]),
    "is_name": lambda r: (_name(r),),
    "plural": lambda r: (r.choice((0, 1, 1, 2, r.randint(3, 40))), r.choice(("cat", "dog", "tree"))),
    "count_runs": lambda r: (_word(r, "aab", 0, 7),),
    # arith
    "clamp": lambda r: (_near(r, 0, 5, 9), r.randint(0, 3), r.randint(4, 9)),
    "gcd": lambda r: (r.randint(0, 40), r.choice((0, r.randint(1, 40)))),
    "is_prime": lambda r: (r.randint(0, 40),),
    "digit_sum": lambda r: (r.choice((0, 10, 100, r.randint(1, 9999))),),
    "fib": lambda r: (r.randint(0, 12),),
    "collatz": lambda r: (r.randint(0, 24),),
    "round_to": lambda r: (r.randint(0, 60), r.choice((2, 4, 5, 10))),
    "ceil_div": lambda r: (r.randint(0, 30), r.randint(0, 6)),
    "percent": lambda r: (r.randint(0, 12), r.randint(0, 8)),
    "is_triangle": lambda r: tuple(r.randint(1, 6) for _ in range(3)),
    "square_root": lambda r: (r.choice((_near(r, 1, 4, 9, 16, 25, 36), r.randint(0, 50))),),
    "overlap": lambda r: (a := r.randint(0, 6), a + r.randint(1, 5), c := r.randint(0, 9), c + r.randint(1, 5)),
    "in_box": lambda r: (r.randint(-1, 4), r.randint(-1, 4), r.randint(1, 4), r.randint(1, 4)),
    "reverse_digits": lambda r: (r.choice((0, 10, r.randint(1, 99), r.randint(1, 9999))),),
    "factors": lambda r: (r.randint(0, 24),),
    "discount": lambda r: (_near(r, 1, 10), r.randint(1, 9)),
    "steps": lambda r: ((r.randint(0, 5), r.randint(0, 5)), (r.randint(0, 5), r.randint(0, 5))),
    "median3": lambda r: tuple(r.randint(0, 9) for _ in range(3)),
    "count_bits": lambda r: (r.randint(0, 70),),
    "change": lambda r: (r.choice((_near(r, 5, 10, 25, 50), r.randint(0, 120))),),
    # lists
    "chunks": lambda r: (_list(r), r.randint(0, 3)),
    "deltas": lambda r: (_list(r),),
    "running_sum": lambda r: (_list(r, 0, 4),),
    "unique": lambda r: (_list(r, 0, 6, 0, 3),),
    "second_max": lambda r: (_list(r, 0, 4, 0, 5),),
    "argmax": lambda r: (_list(r, 0, 5, 0, 5),),
    "count_above": lambda r: (_list(r, 0, 5, 0, 5), r.randint(0, 5)),
    "is_sorted": lambda r: (r.choice((sorted, list))(_list(r, 0, 4, 0, 4)),),
    "interleave": lambda r: (_list(r, 0, 3), _list(r, 0, 3)),
    "median": lambda r: (_list(r, 0, 6),),
    "split_at": lambda r: (_list(r, 0, 5, 0, 6), r.randint(1, 5)),
    "index_of": lambda r: (_list(r, 0, 5, 0, 4), r.randint(0, 4)),
    "moving_sum": lambda r: (_list(r), r.randint(1, 3)),
    "take_until": lambda r: (_list(r, 0, 5, 0, 6), r.randint(2, 6)),
    "peaks": lambda r: (_list(r, 0, 6, 0, 4),),
    "dot": lambda r: _same_length(r) if r.random() < 0.8 else (_list(r, 0, 3), _list(r, 0, 3)),
    "only_in": lambda r: (_list(r, 0, 4, 0, 4), _list(r, 0, 4, 0, 4)),
    "spread": lambda r: (_list(r, 0, 4, -9, 9),),
    "remove_at": lambda r: (_list(r, 0, 4), r.randint(-2, 5)),
    "swap_ends": lambda r: (_list(r),),
    "page": lambda r: (_list(r, 0, 6), r.randint(0, 3), r.randint(1, 3)),
    "score": lambda r: (_list(r, 0, 4, 0, 2), [r.choice((0, 1, 2, None)) for _ in range(r.randint(0, 4))]),
    # longer
    "run_length": lambda r: (_word(r, "aab", 0, 6),),
    "to_roman": lambda r: (r.choice((_near(r, 1, 4, 9, 39), r.randint(1, 39))),),
    "from_roman": lambda r: (r.choice(("I", "IV", "VI", "IX", "XI", "XIV", "XL", "LX", "XXIX", _word(r, "XXVI", 0, 4))),),
    "search": lambda r: (sorted(_list(r)), r.randint(0, 9)),
    "merge": lambda r: (sorted(_list(r, 0, 3)), sorted(_list(r, 0, 3))),
    "two_sum": lambda r: (_list(r, 0, 5, 0, 6), r.randint(2, 10)),
    "valid_card": lambda r: (_card(r),),
    "parse_query": lambda r: (_query(r),),
    "wrap_words": lambda r: (_words(r, 0, 4), r.randint(3, 10)),
    "merge_spans": lambda r: ([(a := r.randint(0, 9), a + r.randint(0, 4)) for _ in range(r.randint(0, 4))],),
    "longest_rise": lambda r: (_list(r, 0, 6),),
    "check_date": lambda r: (r.choice((1900, 2000, 2023, 2024)), r.choice((0, 2, 2, 4, 12, 13)), r.choice((0, 1, 28, 29, 30, 31, 32))),
}
