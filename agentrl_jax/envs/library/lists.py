"""Lists in, lists, numbers and truth values out."""
# pyright: reportMissingParameterType=false


def chunks(xs, n):
    if n < 1:
        raise ValueError
    return [xs[i : i + n] for i in range(0, len(xs), n)]


def deltas(xs):
    out = []
    for i in range(1, len(xs)):
        out.append(xs[i] - xs[i - 1])
    return out


def running_sum(xs):
    n = 0
    out = []
    for x in xs:
        n += x
        out.append(n)
    return out


def unique(xs):
    out = []
    for x in xs:
        if x not in out:
            out.append(x)
    return out


def second_max(xs):
    ys = sorted(set(xs))
    if len(ys) < 2:
        return None
    return ys[-2]


def argmax(xs):
    k = 0
    for i in range(len(xs)):
        if xs[i] > xs[k]:
            k = i
    return k


def count_above(xs, k):
    n = 0
    for x in xs:
        if x > k:
            n += 1
    return n


def is_sorted(xs):
    for i in range(1, len(xs)):
        if xs[i - 1] > xs[i]:
            return False
    return True


def interleave(xs, ys):
    out = []
    for x, y in zip(xs, ys):
        out += [x, y]
    n = len(out) // 2
    return out + xs[n:] + ys[n:]


def median(xs):
    ys = sorted(xs)
    if not ys:
        return None
    return ys[(len(ys) - 1) // 2]


def split_at(xs, k):
    a = [x for x in xs if x < k]
    b = [x for x in xs if x >= k]
    return a, b


def index_of(xs, k):
    for i in range(len(xs)):
        if xs[i] == k:
            return i
    return -1


def moving_sum(xs, n):
    k = len(xs) - n + 1
    return [sum(xs[i : i + n]) for i in range(k)]


def take_until(xs, k):
    out = []
    for x in xs:
        if x >= k:
            break
        out.append(x)
    return out


def peaks(xs):
    out = []
    for i in range(1, len(xs) - 1):
        if xs[i] > xs[i - 1] and xs[i] > xs[i + 1]:
            out.append(i)
    return out


def dot(xs, ys):
    if len(xs) != len(ys):
        raise ValueError
    return sum(x * y for x, y in zip(xs, ys))


def only_in(xs, ys):
    a = [x for x in xs if x not in ys]
    b = [y for y in ys if y not in xs]
    return a, b


def spread(xs):
    if not xs:
        return 0
    return max(xs) - min(xs)


def remove_at(xs, i):
    if i < 0 or i >= len(xs):
        return xs
    return xs[:i] + xs[i + 1 :]


def swap_ends(xs):
    if len(xs) < 2:
        return xs
    return [xs[-1]] + xs[1:-1] + [xs[0]]


def page(xs, k, n):
    i = (k - 1) * n
    if k < 1 or i >= len(xs):
        return []
    return xs[i : i + n]


def score(xs, ys):
    n = 0
    for x, y in zip(xs, ys):
        n += 2 if x == y else 0
        n -= 1 if y is None else 0
    return n
