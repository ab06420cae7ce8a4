"""Studies: tables and figures of a paper as one file, run by one command (`raydpfl reproduce`).

A study compares *arms*, whole methods, at every label of some axes, the *panels*. One arm at one
label of each is a *cell*. Values that a cell leaves open are chosen first, by runs with rows held
out and without a look at the test set; the cell's final runs have other seeds. A run that several
cells share is trained once.

The file has the sections of an experiment (see `raydpfl show`), which all cells begin with, and:

```yaml
study:
  id: mine/clipping         # letters, digits, . - _ /
  title: one line
  shows: what it shows, in a few sentences
  answers: [other names]    # by which `raydpfl reproduce` finds it
  lost: what was chosen because nobody states it, and substitutes
  seeds: 3                  # final runs of a cell: seeds seed + 1, seed + 2, ...
  judge: validation_accuracy    # what values are chosen by: a number of summary.json
  better: larger            # or smaller; of a judge that is no validation_accuracy or _loss
  validation: 0.1           # share of every client's rows held out while values are chosen
  chosen_at: {budget: low}  # values are chosen at these labels alone, and taken at all others
  accounting:               # an axis, if given: what each label means for private arms
    paper: {noise.calibration: paper}
    true: {noise.calibration: rigorous}
  same_bits:                # arms whose models must be equal, bit by bit, at these labels
    - [Clip, Weighted, {data.clients: 50}]
noise: {kind: gaussian, delta: 1.0e-5}
scales:                     # what smoke, small and paper change, in all cells
  smoke: {rounds: 2, data.kind: fashion_mnist_mini, seeds: 2, tries: 2, only: {arm: [Clip, Free]}}
panels:                     # axes; cells stand at all combinations of their labels
  data:                     # a section, replaced whole
    iid: {kind: mnist, clients: 100}
    shards: {kind: mnist, clients: 100, partition: {kind: shards, per_client: 5}}
  data.clients: [50, 100]   # a dotted key: labels and values, or a list of values
  budget:                   # any other name: each label changes sections and dotted keys
    low: {"noise.epsilon?": 1.0, rounds: 50}
    high: {"noise.epsilon?": 8.0}
arms:                       # each replaces whole sections; a dotted key sets one value
  Free: {noise: {kind: none}}
  Clip: {bounding: {kind: clip, bound: {tune: [0.5, 1.0]}}}
  Weighted: {bounding: {kind: clip, bound: {tune: [0.5, 1.0]}}, weights: {kind: data}}
  Mine: {bounding: {kind: "mine:Tanh", bound: 1.0}, only: {budget: [low]}}  # a class of your own
show:                       # figures and tables: see `raydpfl.sweep.study.outputs`
  - {table: test_accuracy, rows: [data, data.clients, budget], columns: arm}
```

A cell is put together in this order: the file's sections, the arm, the panels, the accounting, the
scale; among dotted keys those of a `kind` first, with which the old kind's keys go. A key that ends
in `?` is skipped where the section's kind has no such key. Labels are texts, as YAML has them.
`tries` takes the first so many values of every grid. A study sets `seed`, `evaluate.test` and
`evaluate.validation` of its runs by itself: the file's own `seed` is that of the runs that choose.

In the place of any value: `{tune: [..]}` or `{tune: {powers_of_two: [-3, 3]}}` for values to choose
among, all combinations of a cell's; and `{from: {arm: FedAvg, value: norm_mean, times: 0.5}}` for a
number of the summaries of another arm's final runs at the same labels, or at those of `panel: {..}`
(`stationary.final_x`: one of a mapping there), the mean over the seeds.

The directory of a study has study.yaml; `trials/`, the runs; results.parquet, a row per final run
of every cell, and tuning.parquet, a row per run that was tried (`raydpfl.sweep.study.tables`);
summary.json, with what failed, the identities and what choosing means; published/, the tables that
its outputs name.

>>> study = Study.from_dict({
...     "study": {"id": "rates", "seeds": 2},
...     "rounds": 2,
...     "panels": {"data.clients": [20, 40]},
...     "arms": {"Clip": {"bounding": {"kind": "clip", "bound": 1.0}}, "Free": {}},
... })
>>> [cell.named() for cell in study.cells]
['Clip data.clients=20', 'Free data.clients=20', 'Clip data.clients=40', 'Free data.clients=40']
"""

from raydpfl.sweep.study.builtin import several
from raydpfl.sweep.study.catalogue import catalogue
from raydpfl.sweep.study.runner import Course, Result, reproduce
from raydpfl.sweep.study.schema import Study

__all__ = ["Course", "Result", "Study", "catalogue", "reproduce", "several"]
