"""The records: `episode` (host), `batch` (device) and the door between them, `collate`.

On disk, `events` are what an episode is folded from, `frames` how bytes are kept safe, `store` and `credits` the two files of a run.
Nothing is imported here, so that host code can have episodes without JAX.
"""
