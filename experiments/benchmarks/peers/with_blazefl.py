"""A job with BlazeFL, `settings.threads` clients at once. It has no clipping."""

from enum import StrEnum

import nets
import torch
from blazefl.contrib import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgPartitionType,
    FedAvgThreadPoolClientTrainer,
)
from job import Job, Teller
from torch import Generator
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Nets:
    """Gives models by name, as BlazeFL asks for them."""

    def select_model(self, model_name: str) -> torch.nn.Module:
        return nets.build(model_name)


class Rows:
    """Gives each client's rows, as BlazeFL asks for them."""

    def __init__(self, job: Job):
        self.job = job

    def get_dataset(self, type_: StrEnum, cid: int | None) -> Dataset:
        assert cid is not None
        rows = self.job.client(cid)
        return TensorDataset(*(torch.tensor(each[rows]) for each in self.job.arrays()))

    def set_dataset(self, type_: StrEnum, cid: int | None, dataset: Dataset) -> None:
        """Nothing of a client's rows changes."""

    def get_dataloader(
        self,
        type_: StrEnum,
        cid: int | None,
        batch_size: int | None,
        generator: Generator | None = None,
    ) -> DataLoader:
        data = self.get_dataset(FedAvgPartitionType.TRAIN, cid)
        return DataLoader(data, batch_size=batch_size, shuffle=True, generator=generator)


def trainer(job: Job) -> FedAvgBaseClientTrainer | FedAvgThreadPoolClientTrainer:
    common = {
        "model_selector": Nets(),
        "model_name": job.net,
        "dataset": Rows(job),
        "device": "cpu",
        "num_clients": job.clients,
        "epochs": job.epochs,
        "batch_size": job.batch,
        "lr": job.lr,
        "seed": 0,
    }
    if job.settings["threads"] == 1:
        return FedAvgBaseClientTrainer(**common)
    return FedAvgThreadPoolClientTrainer(num_parallels=job.settings["threads"], **common)


def main() -> None:
    teller = Teller()
    job = Job.given()
    torch.set_num_threads(1)
    handler = FedAvgBaseServerHandler(
        model_selector=Nets(),
        model_name=job.net,
        dataset=Rows(job),
        global_round=job.rounds,
        num_clients=job.clients,
        sample_ratio=job.cohort / job.clients,
        device="cpu",
        batch_size=job.batch,
        seed=0,
    )
    clients = trainer(job)
    while not handler.if_stop():
        sampled = handler.sample_clients()
        clients.local_process(handler.downlink_package(), sampled)
        for package in clients.uplink_package():
            handler.load(package)
        teller.round_ended()
    teller.tell(loss=nets.loss(handler.model, job))


if __name__ == "__main__":
    main()
