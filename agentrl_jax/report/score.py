"""Success rates as a table for people."""

from agentrl_jax.report.summary import wilson

Score = dict[str, tuple[int, int]]
"""(successes, episodes) by "split, sampled | greedy"."""


def table(columns: dict[str, Score]) -> str:
    """Success rates with 95 % Wilson intervals, a column for each policy."""
    lines = [f"{'':34}" + "".join(f"{name:>26}" for name in columns)]
    for row in next(iter(columns.values())):
        cells = []
        for found in columns.values():
            won, n = found[row]
            low, high = wilson(won, n)
            cells.append(f"{won / max(n, 1):.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"{row:34}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)
