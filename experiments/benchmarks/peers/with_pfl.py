"""A job with pfl-research: `settings.threads` of torch in each process. For several processes it is
started by `torchrun`, as pfl's documentation has it.
"""

from functools import partial

import nets
import numpy as np
import torch
import torch.nn.functional as F
from job import Job, Teller
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.privacy_mechanism import NormClippingOnly
from torch import nn


class Trained(nn.Module):
    """The net, with the methods that pfl asks of a module."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.train()
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"loss": Weighted(float(F.cross_entropy(self.net(x), y, reduction="sum")), len(y))}


class Told(TrainingProcessCallback):
    def __init__(self, teller: Teller):
        self.teller = teller

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        self.teller.round_ended()
        return False, Metrics()


def users(job: Job) -> FederatedDataset:
    device = pytorch_ops.get_default_device()
    x, y = (torch.from_numpy(np.array(each)).to(device) for each in job.arrays())

    def user(index: int) -> Dataset:
        rows = job.client(index)
        return Dataset((x[rows], y[rows]), user_id=str(index))

    return FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(job.clients))))


def main() -> None:
    teller = Teller()
    job = Job.given()
    torch.set_num_threads(job.settings["threads"])
    net = nets.build(job.net)
    module = Trained(net)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=partial(torch.optim.SGD),
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    clients = users(job)
    clipping = NormClippingOnly(order=2, clipping_bound=job.clip)
    first = pytorch_ops.distributed.global_rank == 0
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds,
            train_cohort_size=job.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(clients, clients, postprocessors=[clipping]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=job.epochs,
            local_learning_rate=job.lr,
            local_batch_size=job.batch,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=job.rows),
        callbacks=[Told(teller)] if first else [],
    )
    if first:
        teller.tell(loss=nets.loss(net, job))


if __name__ == "__main__":
    main()
