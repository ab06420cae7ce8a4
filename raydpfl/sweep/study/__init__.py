"""Studies: tables and figures of a paper as one file, run by one command (`raydpfl reproduce`).

A study compares *arms*, whole methods, at every label of some axes, the *panels*. One arm at one
label of each is a *cell*. Values that a cell leaves open are chosen first, by runs with rows held
out and without a look at the test set; the cell's final runs have other seeds. A run that several
cells share is trained once. The format of the file: docs/studies.md.

>>> study = Study.from_dict({
...     "study": {"id": "rates", "seeds": 2},
...     "rounds": 2,
...     "panels": {"data.clients": [20, 40]},
...     "arms": {"Clip": {"bounding": {"kind": "clip", "bound": 1.0}}, "Free": {}},
... })
>>> [cell.display_name() for cell in study.cells]
['Clip data.clients=20', 'Free data.clients=20', 'Clip data.clients=40', 'Free data.clients=40']
"""

from raydpfl.sweep.study.builtin import several
from raydpfl.sweep.study.runner import StudyResult, StudyRunner, reproduce
from raydpfl.sweep.study.schema import Study

__all__ = ["Study", "StudyResult", "StudyRunner", "reproduce", "several"]
