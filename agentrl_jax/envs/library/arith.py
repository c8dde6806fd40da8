"""Whole numbers in, whole numbers and truth values out."""
# pyright: reportMissingParameterType=false


def clamp(x, lo, hi):
    if x < lo:
        return lo
    return hi if x > hi else x


def gcd(a, b):
    while b != 0:
        a, b = b, a % b
    return a


def is_prime(n):
    for d in range(2, n):
        if n % d == 0:
            return False
    return n > 1


def digit_sum(n):
    k = 0
    while n > 0:
        k += n % 10
        n = n // 10
    return k


def fib(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def collatz(n):
    k = 0
    while n > 1:
        n = 3 * n + 1 if n % 2 == 1 else n // 2
        k += 1
    return k


def round_to(n, k):
    r = n % k
    if r * 2 < k:
        return n - r
    return n - r + k


def ceil_div(a, b):
    if b == 0:
        raise ValueError
    return (a + b - 1) // b


def percent(a, b):
    if b == 0:
        return 0
    return min(100 * a // b, 100)


def is_triangle(a, b, c):
    if a + b <= c or a + c <= b:
        return False
    return b + c > a


def square_root(n):
    k = 0
    while (k + 1) * (k + 1) <= n:
        k += 1
    return k


def overlap(a, b, c, d):
    lo = max(a, c)
    hi = min(b, d)
    return hi - lo if hi > lo else 0


def in_box(x, y, w, h):
    if x < 0 or y < 0:
        return False
    return x < w and y < h


def reverse_digits(n):
    k = 0
    while n > 0:
        k = k * 10 + n % 10
        n = n // 10
    return k


def factors(n):
    out = []
    for d in range(1, n + 1):
        if n % d == 0:
            out.append(d)
    return out


def discount(n, price):
    if n >= 10:
        return n * price - n
    return n * price


def steps(p, q):
    x = abs(p[0] - q[0])
    y = abs(p[1] - q[1])
    return x + y


def median3(a, b, c):
    lo = min(a, b)
    hi = max(a, b)
    return max(lo, min(hi, c))


def count_bits(n):
    k = 0
    while n > 0:
        k += n % 2
        n = n // 2
    return k


def change(n):
    a = n // 25
    b = n % 25 // 5
    return a, b, n % 5
