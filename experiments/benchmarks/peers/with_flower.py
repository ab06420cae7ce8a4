"""A job with Flower's simulation on Ray: a core for each client that trains."""

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import nets
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.simulation import run_simulation
from job import Job, Teller
from torch.utils.data import DataLoader, TensorDataset


def client_app(job: Job) -> ClientApp:
    app = ClientApp(mods=[fixedclipping_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = nets.build(job.net)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        rows = job.client(int(context.node_config["partition-id"]))
        data = TensorDataset(*(torch.tensor(each[rows]) for each in job.arrays()))
        loader = DataLoader(data, batch_size=job.batch, shuffle=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=job.lr)
        net.train()
        for _ in range(job.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(data)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def server_app(job: Job, teller: Teller) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        def ended(server_round: int, arrays: ArrayRecord) -> None:
            if server_round > 0:
                teller.round_ended()

        strategy = DifferentialPrivacyClientSideFixedClipping(
            FedAvg(
                fraction_train=job.cohort / job.clients,
                fraction_evaluate=0.0,
                min_train_nodes=job.cohort,
                min_available_nodes=job.clients,
            ),
            noise_multiplier=0.0,
            clipping_norm=job.clip,
            num_sampled_clients=job.cohort,
        )
        net = nets.build(job.net)
        first = ArrayRecord(net.state_dict())
        result = strategy.start(grid, first, num_rounds=job.rounds, evaluate_fn=ended)
        net.load_state_dict(result.arrays.to_torch_state_dict())
        teller.tell(loss=nets.loss(net, job))

    return app


def main() -> None:
    teller = Teller()
    job = Job.given()
    run_simulation(
        server_app(job, teller),
        client_app(job),
        num_supernodes=job.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    main()
