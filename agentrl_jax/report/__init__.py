"""A run as people see it.

metrics.py   the table of all metric names, and the file they are written to
summary.py   episodes to metrics: endings, errors, success with its interval
audit.py     what the reward was paid for, and the alarm where it rises without true success
progress.py  the line in the terminal
load.py      a run folder as one record, damaged parts named
sample.py    which episodes a page shows, and their compact form
page.py      the record as one HTML file; its style and scripts are in viewer/
"""
