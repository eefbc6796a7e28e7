"""How a service is measured: workloads, the load they make, and what their latencies amount to."""
