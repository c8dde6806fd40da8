"""Strings in, strings, numbers and truth values out."""
# pyright: reportMissingParameterType=false


def initials(s):
    out = ''
    for w in s.split():
        out += w[0].upper()
    return out


def caesar(s, k):
    out = ''
    for c in s:
        out += chr((ord(c) - 97 + k) % 26 + 97)
    return out


def is_palindrome(s):
    p = [c for c in s.lower() if c.isalpha()]
    return p == p[::-1]


def count_vowels(s):
    n = 0
    for c in s.lower():
        if c in 'aeiou':
            n += 1
    return n


def shorten(s, n):
    if len(s) <= n:
        return s
    return s[: n - 2] + '..'


def pad_left(s, n):
    while len(s) < n:
        s = '0' + s
    return s


def common_prefix(a, b):
    i = 0
    while i < len(a) and i < len(b) and a[i] == b[i]:
        i += 1
    return a[:i]


def squeeze(s):
    out = s[:1]
    for c in s[1:]:
        if c != out[-1]:
            out += c
    return out


def snake(s):
    out = ''
    for i, c in enumerate(s):
        out += '_' if c.isupper() and i > 0 else ''
        out += c.lower()
    return out


def mask(s):
    k = len(s) - 4
    if k < 1:
        return s
    return '*' * k + s[k:]


def longest_word(s):
    out = ''
    for w in s.split():
        if len(w) > len(out):
            out = w
    return out


def rotate_text(s, k):
    if not s:
        return s
    k = k % len(s)
    return s[k:] + s[:k]


def is_anagram(a, b):
    a = a.lower().replace(' ', '')
    b = b.lower().replace(' ', '')
    return a != b and sorted(a) == sorted(b)


def balanced(s):
    n = 0
    for c in s:
        n += 1 if c == '(' else -1
        if n < 0:
            return False
    return n == 0


def unwrap(s):
    if len(s) > 1 and s[0] == '*' and s[-1] == '*':
        return s[1:-1]
    return s


def extension(s):
    i = s.rfind('.')
    if i < 1:
        return ''
    return s[i + 1 :].lower()


def middle(s):
    k = (len(s) - 1) // 2
    return s[k : len(s) - k]


def hamming(a, b):
    if len(a) != len(b):
        raise ValueError
    return sum(1 for x, y in zip(a, b) if x != y)


def is_name(s):
    if not s or s[0].isdigit():
        return False
    return all(c.isalnum() or c == '_' for c in s)


def plural(n, w):
    if n == 1:
        return '1 ' + w
    return str(n) + ' ' + w + 's'


def count_runs(s):
    n = 0
    for i in range(len(s)):
        if i == 0 or s[i] != s[i - 1]:
            n += 1
    return n
