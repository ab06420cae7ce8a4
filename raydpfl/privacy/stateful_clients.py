"""Clients that remember: where sampling still amplifies privacy when a contribution depends on
earlier rounds.

With error feedback (alpha-NormEC) and control variates (SCAFFOLD) what a client sends depends on
the rounds in which it took part before. Its coins of different rounds are then no longer
independent given what was released, and the usual composition of subsampled Gaussians does not
apply. Nothing is lost where nothing is amplified: a known or full cohort composes Gaussians of
bounded sensitivity, whatever the contributions depend on, as long as that is not the noise.

>>> from raydpfl.privacy.mechanism import Mechanism, Query, Sampling
>>> queries = (Query("updates", bound=1.0, std=4.0),)
>>> poisson = Mechanism(Sampling("poisson", 100, 10), queries, rounds=5, memory="alpha_norm_ec")
>>> print(unproved(poisson))
None
>>> fixed = Mechanism(Sampling("fixed", 100, 10), queries, rounds=5, memory="alpha_norm_ec")
>>> print(unproved(fixed))  # doctest: +NORMALIZE_WHITESPACE
that a hidden cohort amplifies privacy is proved for rounds without memory, or under Poisson;
alpha_norm_ec has one

**Clients that remember their noise.** Where each client draws its part of the noise and remembers
what it sent (SCAFFOLD), later contributions depend on noise of which only the sum was released.
They tell of its parts, so that the sums of several rounds protect a client less than fresh noise
would. Take two clients, one dimension, bound 1 and two rounds, each client's noise with std s << 1:
client j sends w_j = z_j, and then -w_j (its correction), while client k sends x + z_k twice. Given
the first sum, the noise of the second is correlated with that of the first. Their covariance is

    s^2 ((2, -1), (-1, 3)),

and k's shift by (2, 2), where it is replaced, has mu^2 = 5.6 / s^2 and not the 4 / s^2 of two
independent rounds. So what sums guarantee such clients is `unproven`, whatever the cohort. An
observer of every single update sees all that a client remembers: the guarantee against it stands,
and so it does against one who sees less.

>>> remembers = {"memory": "scaffold", "remembers_noise": True}
>>> full = Mechanism(Sampling("full", 100, 100), queries, 5, placement="client", **remembers)
>>> print(unproved(full))  # doctest: +NORMALIZE_WHITESPACE
that the noise of all protects a client in their sum is proved where no client remembers its own;
with scaffold each does

**Theorem (Poisson).** Let a client take part in round t by its own coin b_t, true with probability
q, and contribute b_t v_t with ||v_t|| <= c, where v_t is any function of its earlier coins, of what
was released before and of whatever else is known. Let N(0, s^2 I) be on every sum. Then, for one
client that may be absent (add_remove, zero_out), the privacy curve of the T rounds is at most that
of T rounds of the memoryless Poisson-subsampled Gaussian of the same q, c and s. So are its Renyi
divergences of every order, in both directions.

*Proof.* Fix everything that does not concern the client, the other clients' coins included; it may
be revealed. The others' part of round t is then a function a_t of the earlier releases o, the same
with and without the client, and the y_t = (o_t - a_t) / s are independent standard normals without
it. With it the releases have the likelihood ratio

    L = sum over b of p(b) prod over t of exp(b_t <y_t, v_t> / s - b_t ||v_t||^2 / (2 s^2)),

p(b) being the probability of the coins b. For v_t = c e, e one unit vector, that is L*, the ratio
of the memoryless mechanism. The curves are E F(L) in the world without the client, for

    F(x) = (x - e^epsilon)+ one way, and F(x) = (1 - e^epsilon x)+ the other;

the Renyi divergences follow from F(x) = x^a (a > 1, or a < 0). All of these are convex. It remains
to show E F(L) <= E F(L*) for every convex F.

Let g_t be independent N(0, c^2 / s^2), and for weights w_b >= 0 let

    H_t(w) = E F(sum over b of w_b exp(sum over u >= t of (b_u g_u - b_u c^2 / (2 s^2)))).

Claim: E[F(L) | y_1 .. y_{t-1}] <= H_t(w), where w_b is p(b) times the factors of L up to round
t - 1. For t = T + 1 both sides are F(L). Suppose that it holds for t + 1. Given y_1 .. y_{t-1},
each v_t is a fixed vector v_t(b), so that

    E[F(L) | y_1 .. y_{t-1}] <= E F(sum over b of w_b exp(X_b - Var(X_b) / 2)),
    X_b = b_t <y_t, v_t(b)> / s + sum over u > t of b_u g_u,

a centred Gaussian vector over b. By Cauchy and Schwarz

    Cov(X_b, X_b') <= Cov(Z_b, Z_b') for all b and b', where Z_b = sum over u >= t of b_u g_u.

Kahane's inequality [1] says that

    E F(sum of w_b exp(X_b - Var(X_b) / 2))

does not decrease when the covariances grow, so the right side is at most H_t(w). At t = 1 the claim
is E F(L) <= H_1(p) = E F(L*).

**A cohort of fixed size.** Under replace-one the other clients' coins depend on the client's own.
Both worlds are then such mixtures, and neither is a Gaussian that the other could be compared with.
No proof is known to us, and no counterexample. Guarantees that would rest on one are of the kind
`unproven`.

[1] Kahane. Sur le chaos multiplicatif. Annales des sciences mathematiques du Quebec 9 (1985),
    pp. 105-150.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raydpfl.privacy.mechanism import Mechanism


def unproved(mechanism: Mechanism) -> str | None:
    """Why the guarantees of this mechanism's sums are not proved, in words; None: they are."""
    found = []
    if mechanism.memory and mechanism.sampling.hidden and mechanism.sampling.coins is None:
        proved = "proved for rounds without memory, or under Poisson"
        found.append(
            f"that a hidden cohort amplifies privacy is {proved}; {mechanism.memory} has one"
        )
    if mechanism.remembers_noise:
        noise = "that the noise of all protects a client in their sum is proved where no client"
        found.append(f"{noise} remembers its own; with {mechanism.memory} each does")
    return ", and ".join(found) or None
