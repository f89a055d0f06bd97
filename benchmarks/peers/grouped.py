"""PyTorch peer: grouped matmuls with `torch._grouped_mm`, and the addition to a float32 gradient.

python -m benchmarks.peers.grouped '{"shape": [64, 32, 16, 4], "groups": [16, 16, 16, 16]}'
"""

import torch
from torch import _grouped_mm  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.peers.torch_run import device_name, own_device, wait


def main() -> None:
    """Entry point of the candidate process."""
    request = read_request()
    (M, K, N, G), device = request["shape"], own_device()
    torch.manual_seed(0)
    x_MK, dy_MN, w_GKN = (torch.randn(shape, device=device).bfloat16() for shape in ((M, K), (M, N), (G, K, N)))
    ends_G = torch.tensor(request["groups"], device=device).cumsum(0).int()
    main_GKN = torch.zeros(G, K, N, device=device)

    def wgrad() -> torch.Tensor:
        return _grouped_mm(x_MK.T, dy_MN, offs=ends_G)

    runs = {
        "forward": lambda: _grouped_mm(x_MK, w_GKN, offs=ends_G),
        "dgrad": lambda: _grouped_mm(dy_MN, w_GKN.transpose(-2, -1), offs=ends_G),
        "wgrad": wgrad,
        "onto_float32": lambda: main_GKN.add_(wgrad()),
    }
    for run in runs.values():
        run()
    answer(device=device_name())
    take_turns(lambda timer: timer.each(runs, wait))


if __name__ == "__main__":
    main()
