"""DTensor inputs: a node of the ATen graph sees the local shard, one of Dynamo's the DTensor.

A correct dump: the local shard is saved, with the placements in the manifest, because the shards
of two ranks have the same file name in two rank folders; no `full_tensor()`, which is a
collective.
"""

import torch
import torch.distributed as dist

MUST = ["aten.mm"]
SETUP_DIST = True


def make(data_dump):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)

    def f(x, w):
        with data_dump():
            y = torch.mm(x, w)
        return y.relu()

    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
    return f, (x, w)
