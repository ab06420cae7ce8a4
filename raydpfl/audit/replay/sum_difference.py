"""How far released sums move from one world of a replay to a neighbouring one."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from raydpfl.audit.client_canaries import sum_mechanism
from raydpfl.audit.replay.record import Neighbour, RoundRecord, mechanism_of
from raydpfl.core.messages import Grid
from raydpfl.simulation.plan import Plan

ROUNDING = 1e-9  # relative: what float64 may differ by


class SumDifference:
    """How far what was released in round `t` moves from one world to another, against what the
    mechanism declares. `hidden`: the victim is in no cohort of the other, and their size a secret.
    """

    def __init__(
        self,
        plan: Plan,
        neighbour: Neighbour,
        hidden: bool,
        t: int,
        record: RoundRecord,
        reference: RoundRecord,
    ):
        self.plan, self.hidden, self.t = plan, hidden, t
        self.record, self.reference = record, reference
        assert reference.cohort is not None
        self.victim, self.share = neighbour.victim, neighbour.share
        self.draws = int((reference.cohort.clients == self.victim).sum())

    def faults(self) -> Iterator[str]:
        plan = self.plan
        if plan.mechanism is None or plan.mechanism.by_draws:
            return
        mechanism = sum_mechanism(plan)
        sum_shift = self._sum()
        squares = 0.0
        for query in mechanism.sums:
            if query is mechanism.queries[0]:
                unit = (self.reference.bound or 0.0) * plan.weight / query.bound
                shift, slack = sum_shift
            else:
                unit = 1.0
                answers = self.record.answers, self.reference.answers
                if not all(query.name in world_answers for world_answers in answers):
                    continue
                shift = abs(answers[0][query.name] - answers[1][query.name])
                slack = 4 * float(np.spacing(abs(answers[1][query.name])))
            max_shift = self.draws * self.share * query.bound * unit
            std = query.std * unit * plan.factor(self.t)
            if plan.lattice is not None:  # the one sum, in steps
                max_shift = self.draws * self.share * math.sqrt(plan.lattice.square)
                std = plan.lattice.std
            squares += (max(shift - slack, 0.0) / std) ** 2
            if not shift <= max_shift * (1 + ROUNDING) + slack:
                yield (
                    f"the sum of {query.name} in round {self.t} moves by {shift:.12g}, where "
                    f"{max_shift:.12g} is declared"
                )
        relation = self.plan.experiment.relation
        declared_mu = mechanism.mu(relation) / plan.factor(self.t) * self.draws * self.share
        declared_mu /= 2 if relation == "replace_one" else 1
        if not math.sqrt(squares) <= declared_mu * (1 + 1e-6):
            yield (
                f"the sums of round {self.t} move by {math.sqrt(squares):.6g} stds of their noise "
                f"together, where the mechanism has {declared_mu:.6g}"
            )
        yield from self._other_client_faults(sum_shift[1])
        yield from self._histogram()

    def square(self) -> float:
        """Of how far the sum of the updates moves, in stds of its noise."""
        shift, slack = self._sum()
        std = self.plan.sum_std(self.t, self.reference.bound)
        return (max(shift - slack, 0.0) / std) ** 2

    def _sum(self) -> tuple[float, float]:
        """How far the sum of the updates moves, and what rounding may add to that."""
        plan = self.plan
        if plan.lattice is not None:  # whose integers are exact
            assert self.record.total is not None and self.reference.total is not None
            return float(np.linalg.norm(self.record.total - self.reference.total)), 0.0
        released_sum, base = self.record.released, self.reference.released
        assert released_sum is not None and base is not None and self.reference.cohort is not None
        grid = Grid.of(
            len(self.reference.cohort),
            None if self.reference.bound is None else self.reference.bound * plan.weight,
            plan.client_std(self.t, self.reference.bound),
        )
        order = self.plan.experiment.bounding.order
        root = len(base) ** (1 / order)
        coarse = 2 * self.draws + (len(self.reference.cohort) if self.hidden else 0)
        slack = root * (coarse * grid.step + 4 * float(np.spacing(np.abs(base).max(initial=0.0))))
        return float(np.linalg.norm(released_sum - base, order)), slack

    def _other_client_faults(self, slack: float) -> Iterator[str]:
        """What clients send, the victim left out, is the same."""
        records = self.record, self.reference
        if any(record.total is None or self.victim not in record.sent for record in records):
            return
        sums = [record.total - record.sent[self.victim] for record in records]
        if not float(np.abs(sums[0] - sums[1]).max(initial=0.0)) <= self.hidden * slack:
            yield f"what others send in round {self.t} differs"

    def _histogram(self) -> Iterator[str]:
        histogram, base = self.record.histogram, self.reference.histogram
        if (histogram is None) != (base is None):
            yield f"a histogram is released after round {self.t} in one world alone"
        if histogram is None or base is None:
            return
        assert self.record.scores is not None and self.reference.scores is not None
        # held-out clients may be scored alone, so that the victim has no score
        others = np.arange(len(self.reference.scores)) != self.victim
        score_vectors = (self.record.scores, self.reference.scores)
        if len({scores[others].tobytes() for scores in score_vectors}) > 1:
            yield f"the scores of others after round {self.t} differ"
        max_shift = math.sqrt(self.share)
        survey = mechanism_of(self.plan).survey
        relation = self.plan.experiment.relation
        if survey is not None and (relation == "replace_one") == (self.share == 2):
            max_shift = min(max_shift, replace(survey, times=1).mu(relation) * survey.std)
        shift = float(np.linalg.norm(histogram - base))
        if not shift <= max_shift * (1 + ROUNDING) + 1e-15 * float(np.abs(base).sum()):
            counts = f"the counts after round {self.t}"
            yield f"{counts} move by {shift:.12g}, where {max_shift:.12g} is declared"
