"""What every wheel must do on the machine it was made for: two ranks train, by the horo that is installed.

hororun -np 2 python tests/smoke.py
"""

import torch

import horo
import horo.torch as hvd


def main() -> None:
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
    assert total.item() == hvd.size() * (hvd.size() + 1) / 2, total

    model = torch.nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    weights = hvd.allgather_object(model.weight.tolist())
    assert all(weight == weights[0] for weight in weights), weights
    if hvd.rank() == 0:
        print(f"{horo.__version__} of {horo.__file__}: {hvd.size()} ranks agree")


if __name__ == "__main__":
    main()
