"""Kinds of task, each with its sandboxed tools and its verifier, behind one protocol (protocol.py).

BugFix         bugfix.py        bugs.py mutate.py inputs.py library/ expert.py
Repository     repository.py    worktree.py workbench.py gitfiles.py
Swe            swe.py           instances.py
SearchQA       search_qa.py     corpus.py questions.py retrieval.py answers.py qa_files.py
Terminal       terminal.py      shelltasks.py shelljobs.py shell.py
Harbor         harbor.py        taskfolder.py runtests.py
DataAnalysis   data_analysis.py notebook.py tables.py sales_questions.py readings_questions.py expected.py

Verdicts: verify.py of single functions, defences.py of whole work trees; inbox.py, worktree.py, referee.py, testrun.py, runtests.py and
interpreter.py are what runs inside a box, as text. Rewards of single turns: turn_rewards.py.
"""
