"""Generated tasks: rows that exact rules make, so that each mechanism has something only it can answer.

Every task is a frozen description with a name and a pure `make`; nothing is stored. `task.py` says what a task is;
`pairs.py` is the probe for far context, `relay.py` the one for carried state, `facts.py` for what is known by heart;
`symbols.py`, `machines.py` and `markov.py` are small skills, `retrieval.py` and `puzzles.py` the natural forms of
retrieval in the chat format.
"""
