from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from raydpfl.methods.local.base import Step
from raydpfl.methods.local.sgd import Sgd


class Sam(Sgd):
    """SGD whose gradients are taken at x + rho g / ||g||, with g the gradient at x of the same
    batch (SAM; Foret et al. 2021, Alg. 1; in federated learning Qu et al. 2022). With clients that
    clip and noise what they send it is DP-FedSAM (Shi et al. 2023, Alg. 1).

    The norm is over all parameters. A gradient of 0 moves nothing.
    """

    examples = (
        {"steps": 4, "batch": 5, "rho": 0.1},
        {"epochs": 1, "batch": 5, "momentum": 0.5, "rho": 0.05},
    )
    kind: str = "sam"
    rho: float = Field(
        default=0.05, gt=0, description="how far away gradients are taken: an L2 norm"
    )

    def perturb(self, x: Tensor, gradient: Tensor, state: Any, at: Step) -> Tensor:
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        return x + self.rho * gradient / norm.clamp(min=torch.finfo(norm.dtype).tiny)
