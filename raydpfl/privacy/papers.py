"""The papers by author and year, as what a user reads names them. The source knows them by number.

>>> cite_papers("u min(1, c / ||u||) (000 eq. 3, 001 eq. 4); experiments/001 took 1,000 rounds")
'u min(1, c / ||u||) (Zhang 2021 eq. 3, Das 2021 eq. 4); experiments/001 took 1,000 rounds'
"""

import re

PAPERS = {
    "000": "Zhang 2021",  # Understanding Clipping for Federated Learning
    "001": "Das 2021",  # On the Convergence of DP FL on Non-Lipschitz Objectives
    "002": "Chen 2024",  # Differentially Private FL on Non-iid Data
    "003": "Xu 2026",  # Tackling Privacy Heterogeneity in Differentially Private FL
}
_NUMBER = re.compile(r"(?<![\w.,/])00[0-3](?![\w/]|[.,]\d)")


def cite_papers(text: str) -> str:
    """A text with the authors of papers in the place of their numbers."""
    return _NUMBER.sub(lambda match: PAPERS[match.group()], text)
