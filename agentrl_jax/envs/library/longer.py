"""Functions of more than six lines, for higher levels."""
# pyright: reportMissingParameterType=false


def run_length(s):
    out = []
    i = 0
    while i < len(s):
        j = i
        while j < len(s) and s[j] == s[i]:
            j += 1
        out.append((s[i], j - i))
        i = j
    return out


def to_roman(n):
    if n < 1 or n > 39:
        raise ValueError
    out = ''
    for k, s in ((10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV')):
        while n >= k:
            out += s
            n -= k
    return out + 'I' * n


def from_roman(s):
    v = {'I': 1, 'V': 5, 'X': 10, 'L': 50}
    n = 0
    for i in range(len(s)):
        k = v[s[i]]
        if i + 1 < len(s) and v[s[i + 1]] > k:
            n -= k
        else:
            n += k
    return n


def search(xs, k):
    lo, hi = 0, len(xs)
    while lo < hi:
        m = (lo + hi) // 2
        if xs[m] < k:
            lo = m + 1
        else:
            hi = m
    return lo


def merge(xs, ys):
    out = []
    i, j = 0, 0
    while i < len(xs) and j < len(ys):
        if xs[i] <= ys[j]:
            out.append(xs[i])
            i += 1
        else:
            out.append(ys[j])
            j += 1
    return out + xs[i:] + ys[j:]


def two_sum(xs, n):
    for i in range(len(xs)):
        for j in range(i + 1, len(xs)):
            if xs[i] + xs[j] == n:
                return i, j
    return None


def valid_card(s):
    n = 0
    for i, c in enumerate(reversed(s)):
        k = int(c)
        if i % 2 == 1:
            k = k * 2
            if k > 9:
                k -= 9
        n += k
    return n % 10 == 0


def parse_query(s):
    out = []
    for p in s.split('&'):
        i = p.find('=')
        if i < 0 and p:
            out.append((p, ''))
        elif i > 0:
            out.append((p[:i], p[i + 1 :]))
    return out


def wrap_words(s, n):
    out = ['']
    for w in s.split():
        if out[-1] and len(out[-1]) + len(w) + 1 > n:
            out.append(w)
        elif out[-1]:
            out[-1] += ' ' + w
        else:
            out[-1] = w
    return out


def merge_spans(xs):
    out = []
    for a, b in sorted(xs):
        if out and a <= out[-1][1]:
            lo, hi = out.pop()
            out.append((lo, max(hi, b)))
        else:
            out.append((a, b))
    return out


def longest_rise(xs):
    best = 0
    n = 0
    for i in range(len(xs)):
        if i > 0 and xs[i] > xs[i - 1]:
            n += 1
        else:
            n = 1
        best = max(best, n)
    return best


def check_date(y, m, d):
    if m < 1 or m > 12 or d < 1:
        return False
    n = 30 if m in (4, 6, 9, 11) else 31
    if m == 2:
        n = 28
        if y % 4 == 0 and (y % 100 != 0 or y % 400 == 0):
            n = 29
    return d <= n
