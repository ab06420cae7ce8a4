"""The privacy budget calculator: of noise, epsilon and rounds any two determine the third, by every
accountant, against every observer.

>>> budget = of_clients(population=1920, cohort=80, rounds=100, noise_multiplier=4.0)
>>> for answer in budget.answers:
...     guarantee = answer.guarantee
...     print(f"{guarantee.accountant:5} {guarantee.observer}: {guarantee.epsilon:.4g}")
pld   every aggregate: 0.9837
pld   every aggregate: 33.1
pld   every single update: 1190
rdp   every aggregate: 2.044
rdp   every aggregate: 35.08
rdp   every single update: 1212
paper every aggregate: 0.7069
>>> round(budget.answers[-1].true_epsilon, 2)  # what the formula's 0.7069 is worth
0.98
>>> print(budget.sentence())  # doctest: +NORMALIZE_WHITESPACE
Epsilon 0.9837 at delta 1e-05 means: at a false-alarm rate of 5%, an observer of every aggregate,
but not who was in the cohorts, can detect that one client was replaced by another at most 13.37% of
the time; blind guessing detects 5%.

One client's local steps (002, 003), where samples are protected and every update is seen:

>>> sample = {"samples": 600, "batch": 10, "steps": 300, "participations": 1}
>>> for answer in of_samples(**sample, epsilon=0.3, delta=1e-2).answers:
...     # std of the mean gradient / bound
...     print(f"{answer.guarantee.accountant}: {answer.noise_multiplier / 10:.3f}")
pld: 0.343
rdp: 0.667
Chen 2024 tCDP: 2.140
Chen 2024 Theorem 5: 0.106
Xu 2026: 2.277

Noise is the multiplier z = std of the noise on the sum / bound. `from_options` is the command line;
`raydpfl.simulation.planned_guarantee` answers for an experiment.
"""

from raydpfl.privacy.calculator.answer import Answer, Budget, PersonalBudget
from raydpfl.privacy.calculator.request import from_options, of_clients, of_samples
from raydpfl.privacy.calculator.solve import MOST_ROUNDS

__all__ = [
    "MOST_ROUNDS",
    "Answer",
    "Budget",
    "PersonalBudget",
    "from_options",
    "of_clients",
    "of_samples",
]
