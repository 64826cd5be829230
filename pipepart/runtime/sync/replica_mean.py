"""The mode `mean`: every replica gets the mean of the gradients, and makes the whole update."""

from __future__ import annotations

import torch.distributed as dist

from pipepart.runtime.sync.buckets import Bucket, BucketedSync

__all__ = ["ReplicaMean"]


class ReplicaMean(BucketedSync):
    """Averages the gradients of one stage over its copies in all replicas."""

    def start(self, bucket: Bucket) -> dist.Work | None:
        work: dist.Work | None = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        return work

    def end(self, bucket: Bucket) -> None:
        self.unpack(bucket)
