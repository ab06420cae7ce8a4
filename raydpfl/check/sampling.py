"""The contract of a sampling scheme: see `raydpfl.privacy.sampling`."""

from raydpfl.check.claims import NOISE, RELATIONS, Claims, LoneClient
from raydpfl.check.contract import hold
from raydpfl.privacy import rdp

ORDERS = 12.0  # Renyi orders up to this one are integrated


def words(case: Claims) -> str:
    """It says in words what it is, and which relation no accountant covers."""
    scheme = case.sampling.scheme
    words = scheme.words(case.sampling)
    hold(isinstance(scheme.kind, str) and scheme.kind, "it has no kind, its name in the ledger")
    hold(isinstance(words, str) and words, f"words gives {words!r}")
    for relation in RELATIONS:
        refusal = scheme.refuses(relation)
        hold(refusal is None or (isinstance(refusal, str) and refusal), f"refuses: {refusal!r}")
    return words


def chances(case: Claims) -> str:
    """Its chances are probabilities, its size a number of clients."""
    sampling = case.sampling
    hold(0 < sampling.q <= 1, f"q is {sampling.q}")
    coins, size = sampling.coins, sampling.size
    hold(coins is None or 0 < coins <= 1, f"the coin's chance is {coins}")
    hold(size is None or 1 <= size <= sampling.cohort * 1e9, f"the size is {size}")
    hold(not (sampling.hidden and sampling.everyone), "everyone takes part, and that is a secret")
    participations = sampling.scheme.participations(sampling, 5, None)
    hold(participations.most >= 1, "a client takes part in no round at all")
    return f"q = {sampling.q:.4g}"


def covered(case: Claims) -> str:
    """Some rigorous accountant covers it, under some relation."""
    coverage = [f"{one.name} under {relation}" for one, _, relation, _ in case.covered()]
    hold(coverage, f"{case.sampling}: give curves, renyi or both")
    return ", ".join(coverage)


def renyi_curve(case: Claims) -> str:
    """Its Renyi divergences rise with the order, and are those of a lone client at least."""
    scheme = case.sampling.scheme
    if not case.sampling.hidden or not scheme.gives("renyi"):
        return "none is needed, or given"
    for relation in [relation for relation in RELATIONS if scheme.refuses(relation) is None]:
        for z in NOISE:
            mu = next(case.mechanisms(z)).mu(relation)
            curve = scheme.renyi(case.sampling, mu, relation)
            hold(curve.shape == rdp.ORDERS.shape, f"{list(curve.shape)} divergences")
            lone = LoneClient.of(case.sampling, relation, mu)
            for order, claim in zip(rdp.ORDERS.tolist(), curve.tolist(), strict=True):
                if not 1.1 <= order <= ORDERS:
                    continue
                floor = lone.renyi(order)
                message = f"{claim:.4g} at order {order:g} with noise {z:g}, under {relation}"
                hold(claim >= floor * (1 - 1e-4), f"{message}; a lone client has {floor:.4g}")
    return f"orders up to {ORDERS:g} held against an integral"
