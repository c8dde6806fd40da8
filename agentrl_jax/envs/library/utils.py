"""Dates, times, versions and other small formats."""
# pyright: reportMissingParameterType=false


def parse_date(s):
    p = s.split('-')
    if len(p) != 3:
        return None
    y, m, d = [int(x) for x in p]
    return (y, m, d) if 0 < m < 13 and 0 < d < 32 else None


def is_leap(y):
    if y % 100 == 0:
        return y % 400 == 0
    return y % 4 == 0


def month_days(y, m):
    if m == 2:
        return 29 if y % 4 == 0 else 28
    return 30 if m in (4, 6, 9, 11) else 31


def parse_time(s):
    h, m = [int(x) for x in s.split(':')]
    if h > 23 or m > 59:
        return None
    return h * 60 + m


def clock(t):
    h = t // 60 % 24
    m = t % 60
    return str(h).zfill(2) + ':' + str(m).zfill(2)


def minutes_until(a, b):
    t = b - a
    if t < 0:
        t = t + 1440
    return t


def weekend(d):
    d = d % 7
    return d == 5 or d == 6


def season(m):
    if m < 3 or m == 12:
        return 'winter'
    if m < 6:
        return 'spring'
    return 'summer' if m < 9 else 'autumn'


def parse_bool(s):
    s = s.strip().lower()
    if s in ('1', 'yes', 'true'):
        return True
    return False if s in ('0', 'no', 'false') else None


def parse_range(s):
    a, b = [int(x) for x in s.split('-')]
    if a > b:
        raise ValueError
    return list(range(a, b + 1))


def parse_pair(s):
    i = s.find('=')
    if i < 1:
        return None
    return s[:i], s[i + 1 :]


def is_newer(a, b):
    p = [int(x) for x in a.split('.')]
    q = [int(x) for x in b.split('.')]
    return p > q


def bump(v, major):
    a, b = v
    if major:
        return a + 1, 0
    return a, b + 1


def grade(n):
    if n >= 90:
        return 'A'
    if n >= 80:
        return 'B'
    return 'C' if n >= 70 else 'F'


def ticket(age):
    if age < 3:
        return 0
    if age < 18 or age >= 65:
        return 5
    return 9


def parse_rgb(s):
    if len(s) != 7 or s[0] != '#':
        return None
    p = [s[i : i + 2] for i in (1, 3, 5)]
    return tuple(int(x, 16) for x in p)


def file_size(n):
    if n < 1024:
        return str(n) + ' B'
    return str(n // 1024) + ' KB'


def ordinal(n):
    if n // 10 % 10 == 1 or n % 10 > 3 or n % 10 == 0:
        return str(n) + 'th'
    return str(n) + ('st', 'nd', 'rd')[n % 10 - 1]


def shipping(w, fast):
    p = 4 if w <= 2 else 4 + w
    if fast and w < 20:
        return p * 2
    return p
