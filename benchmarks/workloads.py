"""The workloads that results are about, by name."""

from nanoserve.observe.workloads import Item, Workload

__all__ = ["WORKLOADS", "Item", "Workload"]

WORKLOADS = {
    # The comparison: 16 requests of mixed lengths.
    "mixed16": Workload(num_requests=16, input_tokens=(16, 256), output_tokens=(16, 128)),
    "single": Workload(num_requests=1, input_tokens=(128, 128), output_tokens=(128, 128)),
    "batch16": Workload(num_requests=16, input_tokens=(128, 128), output_tokens=(128, 128)),
    "shared16": Workload(num_requests=16, input_tokens=(16, 16), output_tokens=(16, 16), num_shared_tokens=512),
    "chat64": Workload(num_requests=64, input_tokens=(8, 200), output_tokens=(8, 100)),
    "tiny": Workload(num_requests=4, input_tokens=(4, 12), output_tokens=(4, 8)),
}
